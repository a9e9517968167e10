"""The generating part of a run: feeds the engine, passes results to the writer, stops when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import Event
from types import FrameType
from typing import Any

from detgen.engine.engine_like import EngineLike
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.engine.stats import EngineStats
from detgen.engine.time_left import TimeLeft
from detgen.interruption import ending_signals
from detgen.outputs import Writer
from detgen.progress import Observer, Progress
from detgen.prompts import BadLine, Prompts
from detgen.run.interface import RunConfig, ScoreConfig

_REPORT_SECONDS = 0.1


class Work:
    """The generating part of a run.

    Attributes:
        seconds: time spent so far.
    """

    def __init__(
        self,
        config: RunConfig | ScoreConfig,
        source: Prompts,
        engine: EngineLike,
        writer: Writer,
        observer: Observer,
        prompts: int | None,
    ) -> None:
        """Prepare the work; `prompts` is the number of prompts in the input, if known."""
        self.seconds = 0.0
        self._engine = engine
        self._writer = writer
        self._observer = observer
        self._total = min(prompts, config.limit or prompts) if prompts is not None else None
        self._stream: Callable[[EngineLike, Iterable[Request]], Iterator[list[Any]]] = config.stream
        self._items = config.items(source, observer.message, engine.profile()["target"]["name"])
        self._name = source.name
        self._exhausted = False
        self._read = 0
        self._time_left = TimeLeft()
        self._stopped = Event()
        self._started = time.monotonic()
        self._reported = -_REPORT_SECONDS

    def run(self) -> bool:
        """Generate until everything is written (True) or a signal asks for a stop (False).

        Raises:
            PromptsError: if the rest of the input cannot be read.
            OutputError: if the output cannot be written.
            KeyboardInterrupt: on a second signal.
        """
        with ending_signals(self._stop):
            while not self._exhausted and not self._stopped.is_set():
                # Ends with the input, or early where too many prompts wait for an earlier one.
                for completions in self._stream(self._engine, self._requests()):
                    self._time_left.spend(self._passed(), self._engine.stats)
                    for completion in completions:
                        self._time_left.finish(completion)
                        self._writer.finish(self._placed(completion))
                    self._writer.flush()
                    self._report()
                    if self._stopped.is_set():
                        break
                else:
                    self._writer.flush(now=True)
                    if self._writer.waiting and not self._stopped.is_set():
                        raise RuntimeError(f"the engine ended with {self._writer.waiting} prompts unfinished")
        self._report(now=True)
        return self._exhausted and not self._writer.waiting

    def _placed(self, completion: Completion | Score) -> Completion | Score:
        """Return the completion; prefix an error with its place in the input, which the engine does not know."""
        if completion.error is None:
            return completion
        return replace(completion, error=f"{self._name}:{completion.request.line}: {completion.error}")

    def _requests(self) -> Iterator[Request]:
        """Yield the requests that have to run; everything else goes to the writer."""
        while not self._writer.full and not self._stopped.is_set():
            item = next(self._items, None)
            if item is None:
                self._exhausted = True
                return
            self._read += 1
            if isinstance(item, BadLine):
                self._writer.refuse(item)
            elif (rest := self._rest(item)) is not None:
                self._time_left.ask(rest, self._passed(), self._engine.stats)
                yield rest
            self._report()

    def _rest(self, request: Request) -> Request | None:
        """Return the request with the samples that no store has; None if there are none."""
        missing = self._writer.recall(request)
        if len(missing) == request.samples:
            return request
        return replace(request, only=tuple(missing)) if missing else None

    def _passed(self) -> float:
        return time.monotonic() - self._started

    def _report(self, *, now: bool = False) -> None:
        self.seconds = self._passed()
        if not now and self.seconds - self._reported < _REPORT_SECONDS:
            return
        self._reported = self.seconds
        stats, total = self._engine.stats, self._total
        left = self._time_left.left(None if total is None else max(0, total - self._read), stats.live)
        figures = tuple(self._figures(stats))
        tokens = stats.tokens, round(stats.tokens / self.seconds, 1)
        self._observer.progress(Progress(self._writer.done, total, "prompts", self.seconds, left, figures, *tokens))

    def _figures(self, stats: EngineStats) -> Iterator[str]:
        counts = stats.drafters.total()
        yield f"{stats.tokens / self.seconds:,.0f} tokens/s"
        yield f"{stats.live} live"
        if stats.workers:
            ready = "" if stats.ready == stats.workers else f"{stats.ready} of "
            yield f"{ready}{stats.workers} worker{'s' if stats.workers > 1 else ''}"
        if counts.acceptance is not None:
            yield f"{counts.acceptance:.0%} of drafts accepted"
            yield f"{counts.corrected:,} roll-backs"
        if self._writer.reused:
            yield f"{self._writer.reused:,} reused"
        if self._writer.errors:
            yield f"{self._writer.errors:,} errors"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stop at the next step; a second signal stops at once."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        self._stopped.set()
