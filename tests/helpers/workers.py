"""Workers without Ray: they run in the test's own process, one call at a time, and die when a test says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.workers.cluster import Call, WorkerDied
from detgen.workers.serving import Serving
from helpers.fakes import FakeEngine, complete

FATAL = "fatal"  # a prompt that ends the process that runs it


class Crash(BaseException):
    """A process has ended."""


class FedEngine(FakeEngine):
    """The engine that computes nothing, for requests that come while its stream runs."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[list[Completion]]:  # type: ignore[override]
        source = iter(requests)
        order = random.Random(self._config.batch_size)
        live: list[Completion] = []
        while True:
            while len(live) < self._config.batch_size and (request := next(source, None)) is not None:
                if request.prompt == FATAL:
                    raise Crash
                live += complete(request)
            self.stats.target_passes += 1
            self.stats.live = len(live)
            order.shuffle(live)
            finished = [live.pop() for _ in range(order.randint(min(1, len(live)), min(3, len(live))))]
            self.stats.tokens += sum(len(each.token_ids) for each in finished)
            yield finished

    score_stream = stream  # type: ignore[assignment]


class LocalCluster:
    """A `Cluster` whose workers are objects; a call runs when it is waited for, in an order that is drawn.

    Args:
        number: of workers.
        build: makes the engine of the worker of a number, from 0.
        seed: of the order.

    Attributes:
        before: is told of each call of `work` before it runs, as the worker and the number of such calls; may `kill`.
        started: how often each worker was started.
    """

    def __init__(
        self, number: int, build: Callable[[int], Any] | None = None, *, batch_size: int = 4, seed: int = 0
    ) -> None:
        self.number = number
        self.before: Callable[[int, int], None] = lambda worker, count: None
        self.started = [0] * number
        self.closed = False
        self.requests: list[MutableSequence[Request]] = [[] for _ in range(number)]  # that each worker was given
        self._config = EngineConfig(batch_size=batch_size)
        self._build = build or (lambda worker: FedEngine(self._config))
        self._order = random.Random(seed)
        self._queues: list[deque[tuple[Call, str, tuple[Any, ...]]]] = [deque() for _ in range(number)]
        self._answers: dict[int, Any] = {}
        self._calls = self._works = 0
        self._workers = [self._start(worker) for worker in range(number)]

    def _start(self, worker: int) -> Serving:
        self.started[worker] += 1
        return Serving(self._config, ".", build=lambda config: self._build(worker))

    def kill(self, worker: int) -> None:
        """The worker dies; calls that are not answered never will be."""
        for call, *_ in self._queues[worker]:
            self._answers[call.answer] = WorkerDied("")
        self._queues[worker].clear()
        self._workers[worker] = self._start(worker)

    def call(self, worker: int, method: str, *arguments: Any) -> Call:
        self._calls += 1
        call = Call(worker, self._calls)
        self._queues[worker].append((call, method, arguments))
        return call

    def wait(self, calls: list[Call], seconds: float) -> list[Call]:
        busy = [worker for worker in range(self.number) if self._queues[worker]]
        if busy and not any(call.answer in self._answers for call in calls):
            self._run(self._order.choice(busy))
        return [call for call in calls if call.answer in self._answers]

    def _run(self, worker: int) -> None:
        call, method, arguments = self._queues[worker][0]
        if method == "work":
            self._works += 1
            self.before(worker, self._works)
            if not self._queues[worker]:  # killed
                return
            self.requests[worker] += arguments[1]
        self._queues[worker].popleft()
        try:
            self._answers[call.answer] = getattr(self._workers[worker], method)(*arguments)
        except Crash:
            self._answers[call.answer] = WorkerDied("")
            self.kill(worker)
        except Exception as error:
            self._answers[call.answer] = error

    def result(self, call: Call) -> Any:
        answer = self._answers.pop(call.answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True
