"""The generating part of a run: feeds the engine, hands what finishes to the writer, stops when asked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from detgen.engine.request import Completion, Request
from detgen.outputs import Writer
from detgen.prompts import BadLine, Prompts
from detgen.run.interface import EngineLike, Observer, Progress, RunConfig

_REPORT_SECONDS = 0.1


class Work:
    """The generating part of a run.

    Attributes:
        writer: what the samples are handed to.
        seconds: time spent so far.
    """

    def __init__(
        self,
        config: RunConfig,
        source: Prompts,
        engine: EngineLike,
        writer: Writer,
        observer: Observer,
        total: int | None,
    ) -> None:
        """Get ready; `total` is the number of prompts, where it is known."""
        self.writer = writer
        self.seconds = 0.0
        self._engine = engine
        self._observer = observer
        self._total = total
        self._items = source.read(config.params, config.limit)
        self._name = source.name
        self._exhausted = False
        self._stop = _Stop()
        self._started = time.monotonic()
        self._reported = -_REPORT_SECONDS

    def run(self) -> bool:
        """Generate until all is written (True) or somebody asks for a stop (False).

        Raises:
            PromptsError: the input cannot be read on.
            OutputError: the output cannot be written.
            KeyboardInterrupt: somebody asked twice.
        """
        with self._stop:
            while not self._exhausted and not self._stop.requested:
                self._stream()
        self._report(now=True)
        return self._exhausted and not self.writer.waiting

    def _stream(self) -> None:
        """Feed the engine until the input ends, or until too many prompts wait for an earlier one."""
        steps = self._engine.stream(self._requests())
        try:
            for completions in steps:
                for completion in completions:
                    self.writer.finish(self._placed(completion))
                self.writer.flush()
                self._report()
                if self._stop.requested:
                    return
        finally:
            if isinstance(steps, Generator):
                steps.close()
        self.writer.flush()
        if self.writer.waiting and not self._stop.requested:
            raise RuntimeError(f"the engine ended with {self.writer.waiting} prompts unfinished")

    def _placed(self, completion: Completion) -> Completion:
        """With the place in the input before an error, which the engine does not know."""
        if completion.error is None:
            return completion
        return replace(completion, error=f"{self._name}:{completion.request.line}: {completion.error}")

    def _requests(self) -> Iterator[Request]:
        """The requests that have to run; the others are dealt with on the way."""
        while not self.writer.full and not self._stop.requested:
            item = next(self._items, None)
            if item is None:
                self._exhausted = True
                return
            if isinstance(item, BadLine):
                self.writer.refuse(item)
            elif not self.writer.recall(item):
                yield item
            self._report()

    def _report(self, *, now: bool = False) -> None:
        self.seconds = time.monotonic() - self._started
        if not now and self.seconds - self._reported < _REPORT_SECONDS:
            return
        self._reported = self.seconds
        self._observer.progress(
            Progress(
                prompts_done=self.writer.done,
                prompts_total=self._total,
                errors=self.writer.errors,
                tokens=self._engine.stats.tokens,
                seconds=self.seconds,
                resumed=self.writer.resumed,
                stats=self._engine.stats,
            )
        )


class _Stop:
    """Whether somebody asked for a stop by a signal. Only the main thread can be asked."""

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
