"""An engine made of workers: distributes requests, and runs those of a worker that died again.

For a run it is an engine like any other: requests in, completions out. It holds the requests that workers have, and
some of the next ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Chunk, Completion, Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import EngineStats
from detgen.errors import EngineError, RunError
from detgen.outputs.identity import profile_differences
from detgen.progress import Observer
from detgen.workers.cluster import Cluster, RayCluster, WorkerDied
from detgen.workers.serving import Answer, Identity
from detgen.workers.waiting import Errand, Waiting, Worker, add_counts
from detgen.workers.worker_config import WorkersConfig

_BATCHES = 2  # batches of requests that a worker has: one runs, one waits there
_CALLS = 2  # calls of a worker at a time: it works on one while the other is answered
_SECONDS = 0.05  # least duration of a call: fewer calls are less work
_SECONDS_PER_WORKER = 0.0005  # the same per worker, for many: the coordinator handles some 5,000 calls a second
_LOOK = 0.1  # seconds after which the stream yields at the latest
_DEATHS = 3  # deaths of a worker while it loads, or of workers running one request alone, after which to give up
_TOGETHER = 2  # deaths after which a request runs alone, to see whether it causes them


@contextmanager
def open_workers(config: WorkersConfig, engine: EngineConfig, observer: Observer) -> Iterator[WorkersEngine]:
    """Open an engine of workers, which end with the block.

    Raises:
        EngineError: as for `RayCluster` and `WorkersEngine`.
    """
    with closing(RayCluster(config, engine, observer)) as cluster:
        yield WorkersEngine(cluster, engine.batch_size, observer)


class WorkersEngine:
    """Runs requests on workers; an `EngineLike` for `detgen.run`.

    Args:
        cluster: the workers.
        batch_size: most requests of a worker at a time.
        observer: receives progress and news of workers.

    Raises:
        EngineError: if an engine cannot be built, workers die while they load, or one differs from the first in what
            decides the bits of an output.
    """

    def __init__(self, cluster: Cluster, batch_size: int, observer: Observer) -> None:
        self._cluster = cluster
        self._samples = _BATCHES * batch_size
        self._seconds = max(_SECONDS, _SECONDS_PER_WORKER * cluster.number)
        self._observer = observer
        self._workers = [Worker(number) for number in range(1, cluster.number + 1)]
        self._suspects: deque[Errand] = deque()
        many = f"{cluster.number} worker{'s' if cluster.number > 1 else ''}"
        observer.stage(f"loading the model in {many}")
        self._first: Identity | None = None
        self._load()

    @property
    def stats(self) -> EngineStats:
        """The counts of all workers together."""
        total = EngineStats(workers=len(self._workers))
        for worker in self._workers:
            add_counts(total, worker.before)
            add_counts(total, worker.stats)
            total.live += worker.stats.live if worker.sent else 0
            total.ready += not worker.deaths and not worker.refused
        return total

    @property
    def thinks(self) -> bool:
        """Whether the model thinks while it reads."""
        return self._known.thinks

    @property
    def dated(self) -> bool:
        """See `Engine.dated`."""
        return self._known.dated

    def profile(self) -> dict[str, Any]:
        """Return everything that decides the bits of an output; the same for all workers."""
        return self._known.profile

    def draft_profile(self) -> dict[str, Any] | None:
        """Return the first worker's draft model, which decides none of the bits; None without one."""
        return self._known.draft

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """See `Engine.chunks`; a worker computes it."""
        for worker in self._workers:
            if worker.identity is not None:
                call = self._cluster.call(worker.number - 1, "chunks", request, list(tokens), dict(thoughts))
                while not self._cluster.wait([call], _LOOK):
                    pass
                found: list[Chunk] = self._cluster.result(call)
                return found
        return []

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Run requests; yields what has finished, often nothing.

        Raises:
            EngineError: if no worker is left.
            RunError: if a request ends each worker that runs it.
        """
        return self._stream(requests, scoring=False)

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        """Score requests; yields and errors as for `stream`."""
        return self._stream(requests, scoring=True)

    @property
    def _known(self) -> Identity:
        assert self._first is not None
        return self._first

    def _load(self) -> None:
        """Load the model in all workers, and check that all are alike."""
        while any(worker.identity is None for worker in self._workers):
            self._begin()
            self._wait(Waiting(iter(())))
            if gone := [worker for worker in self._workers if worker.refused]:
                raise EngineError("; ".join(worker.reason for worker in gone))
        first, *others = self._workers
        self._first = first.identity
        if unlike := [text for worker in others if (text := self._differs(worker)) is not None]:
            raise EngineError(
                f"{'; '.join(unlike)}. Outputs could differ from those of {first.name}: have the same model, versions"
                " and kind of machine for all workers"
            )

    def _stream(self, requests: Iterable[Request], *, scoring: bool) -> Iterator[list[Any]]:
        waiting = Waiting(iter(requests))
        try:
            while True:
                waiting.look_ahead()
                self._begin()
                self._send(waiting, scoring)
                if not any(worker.sent for worker in self._workers) and not len(waiting) and not self._suspects:
                    return
                yield self._wait(waiting)
        finally:
            for worker in self._workers:
                if worker.sent or worker.behind:  # nothing of this stream may appear in the next
                    worker.forget()
            self._suspects.clear()

    def _begin(self) -> None:
        """Have workers that are not ready begin."""
        for worker in self._workers:
            if worker.identity is None and not worker.calls and not worker.refused:
                worker.calls.append(self._cluster.call(worker.number - 1, "begin"))
        if all(worker.refused for worker in self._workers):
            reasons = "; ".join(worker.reason for worker in self._workers)
            raise EngineError(f"no worker is left: {reasons}; what was finished is kept: run the same command again")

    def _send(self, waiting: Waiting, scoring: bool) -> None:
        """Give workers as many requests as they have room for, and have them continue."""
        ready = [w for w in self._workers if w.identity is not None and len(w.calls) < _CALLS]
        part = -(-len(waiting) // max(len(self._workers), 1))  # the last requests are divided
        for worker in ready:
            assert worker.identity is not None
            new: list[Errand] = []
            if self._suspects and not worker.sent:
                new, worker.alone = [self._suspects.popleft()], True
            elif not worker.alone:
                room = self._samples - sum(e.request.samples - len(e.delivered) for e in worker.sent.values())
                new = waiting.take(worker.number, min(room, part))
            worker.behind = worker.behind or any(errand.delivered for errand in new)
            worker.sent |= {errand.request.index: errand for errand in new}
            if new or worker.sent:
                requests = [errand.request for errand in new]
                asked = worker.identity.instance, requests, scoring, self._seconds
                worker.calls.append(self._cluster.call(worker.number - 1, "work", *asked))

    def _wait(self, waiting: Waiting) -> list[Any]:
        """Wait for a moment; return what has finished."""
        owners = {call: worker for worker in self._workers for call in worker.calls}
        done: list[Any] = []
        for call in self._cluster.wait(list(owners), _LOOK):
            worker = owners[call]
            if call not in worker.calls:  # it has just died
                continue
            worker.calls.remove(call)
            try:
                answer = self._cluster.result(call)
            except WorkerDied as death:
                self._lost(worker, waiting, str(death))
                continue
            if isinstance(answer, Identity):
                self._welcome(worker, answer)
            elif isinstance(answer, Answer):
                worker.stats = answer.stats
                done += [found for each in answer.done if (found := self._arrived(worker, each)) is not None]
            else:  # it died between two calls
                self._lost(worker, waiting)
        return done

    def _arrived(self, worker: Worker, completion: Completion | Score) -> Completion | Score | None:
        """Return a completion with its request; None if a worker that died delivered it before."""
        index = completion.request.index
        errand = worker.sent.get(index)
        if errand is None or completion.sample in errand.delivered:
            return None
        errand.delivered.add(completion.sample)
        if completion.refused or len(errand.delivered) == errand.request.samples:
            del worker.sent[index]
            worker.alone = worker.alone and bool(worker.sent)
        request: Any = errand.request
        return replace(completion, request=request)

    def _welcome(self, worker: Worker, identity: Identity) -> None:
        """Mark a worker as ready; refuse one that was started again and differs from the first one."""
        worker.identity, worker.node, worker.deaths = identity, identity.node, 0
        if self._first is not None and (text := self._differs(worker)) is not None:
            worker.identity = None
            self._refuse(worker, text)

    def _differs(self, worker: Worker) -> str | None:
        """Return how a worker differs from the first one in what decides the bits of an output; None if it does not."""
        assert worker.identity is not None
        found = profile_differences(_decisive(self._known), _decisive(worker.identity))
        return f"{worker.name} differs: {'; '.join(found)}" if found else None

    def _lost(self, worker: Worker, waiting: Waiting, cause: str = "") -> None:
        """Handle the death of a worker: run its requests again."""
        errands, alone, was_ready = list(worker.sent.values()), worker.alone, worker.identity is not None
        worker.died()
        for errand in errands:
            errand.deaths += 1
            errand.alone += alone
            if errand.alone >= _DEATHS:
                raise RunError(_deadly(errand))
        again = [errand for errand in errands if errand.deaths < _TOGETHER]
        waiting.put_back(again)
        self._suspects += [errand for errand in errands if errand.deaths >= _TOGETHER]
        if was_ready:
            many = "1 request runs" if len(errands) == 1 else f"{len(errands)} requests run"
            self._observer.message(f"{worker.name} died; it is started again{f', and {many} again' if errands else ''}")
        elif worker.deaths >= _DEATHS:
            why = f" ({cause})" if cause else ", as processes do when memory runs out; ask for fewer --workers"
            self._refuse(worker, f"{worker.name} died {worker.deaths} times while it loaded the model{why}")

    def _refuse(self, worker: Worker, reason: str) -> None:
        worker.refused, worker.reason = True, reason
        if self._first is not None:
            self._observer.message(f"{reason}; the run goes on without it")


def _decisive(identity: Identity) -> dict[str, Any]:
    """Return what decides the bits of an output."""
    return {"detgen": identity.version, "profile": identity.profile}


def _deadly(errand: Errand) -> str:
    request = errand.request
    line = "" if request.line is None else f" (line {request.line})"
    return (
        f"{request.id!r}{line} ended {errand.deaths} workers, {errand.alone} of which ran nothing else; see that there"
        " is memory for it, or leave it out. What was finished is kept: run the same command again to resume"
    )
