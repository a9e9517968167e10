"""A stream: takes sequences as there is room for them, and runs them round by round until all have ended.

One call generates at a time on one set of models. Calls from several threads take turns, first come, first served. A
call from the thread that reads another call's stream would wait forever and is refused. Between two rounds a stream
stands still while its reader does something else; others wait as long as it is being read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.errors import EngineError
from detgen.kernels.c.threads import use_threads
from detgen.runner.model_runner import ModelRunner

_PATIENCE = 30.0  # seconds that others wait for a stream that is not read
_LOOK = 0.5  # seconds between checks of whose turn it is
_Done = TypeVar("_Done")


class Turn:
    """The right to generate, from `Turns.take` to `Turns.give_back`."""

    __slots__ = ("still", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.still: float | None = None

    def pause(self) -> None:
        """Note that a stream yields to its reader."""
        self.still = time.monotonic()

    def go_on(self) -> None:
        """Note that the reader, perhaps in another thread by now, wants more."""
        self.thread = threading.get_ident()
        self.still = None


class Turns:
    """Hands out turns, one at a time. Shared by all engines on the same models."""

    def __init__(self) -> None:
        # Reentrant: a stream may be collected, and end its turn, wherever Python collects garbage.
        self._changed = threading.Condition(threading.RLock())
        self._holder: Turn | None = None
        self._queue: deque[Turn] = deque()

    def take(self) -> Turn:
        """Wait for a turn.

        Raises:
            EngineError: if this thread already has the turn, or its owner has stopped reading.
        """
        mine = Turn()
        with self._changed:
            self._queue.append(mine)
            try:
                while self._holder is not None or self._queue[0] is not mine:
                    self._check(mine)
                    self._changed.wait(_LOOK)
                self._holder = mine
            finally:
                self._queue.remove(mine)
                self._changed.notify_all()
        return mine

    def _check(self, mine: Turn) -> None:
        holder = self._holder
        if holder is None:
            return
        if holder.thread == mine.thread:
            raise EngineError(
                "this engine is generating already: read its stream to the end, or close it, before the next call; "
                "engines made by with_settings share their models and take turns too"
            )
        still = holder.still
        if still is not None and time.monotonic() - still > _PATIENCE:
            raise EngineError(
                f"another thread has an open stream of this engine that has not been read for {_PATIENCE:.0f} seconds: "
                "read it to the end, or close it"
            )

    def give_back(self, turn: Turn) -> None:
        """End a turn; the next in the queue gets it."""
        with self._changed:
            if self._holder is turn:
                self._holder = None
            self._changed.notify_all()


class StreamingRounds:
    """Runs the sequences of one call at a time, and updates the counters.

    Args:
        turns: decide which call may run.
        scheduler: schedules the sequences.
        stats: updated after each round.
        target: passes of the target.
        drafting: passes that draft.
        threads: number of threads for passes; None leaves it as it is.
    """

    def __init__(
        self,
        turns: Turns,
        scheduler: Scheduler,
        stats: EngineStats,
        target: ModelRunner,
        drafting: Iterable[ModelRunner],
        threads: int | None,
    ) -> None:
        self._turns, self._scheduler, self._stats = turns, scheduler, stats
        self._target, self._drafting, self._threads = target, tuple(drafting), threads

    def run(
        self,
        sequences: Iterator[Sequence | None],
        refused: list[_Done],
        step: Callable[[], list[_Done]],
        clear: Callable[[], None],
    ) -> Iterator[list[_Done]]:
        """Run sequences until all have ended.

        Args:
            sequences: the sequences to run; None if there is no other yet.
            refused: results that ended without running; emptied when they are yielded.
            step: runs a round and returns what it finished.
            clear: forgets the sequences that have not ended, at the end.

        Yields:
            After each round, the refused results and those that the round finished.

        Raises:
            EngineError: if this thread is reading another stream of the engine.
        """
        scheduler = self._scheduler
        turn = self._turns.take()
        try:
            use_threads(self._threads)
            more = True
            while more or scheduler.waiting or scheduler.live:
                taken, more = _taken(sequences, scheduler.wants())
                scheduler.add(taken)
                done = step()
                finished = [*refused, *done]
                refused.clear()
                self._count()
                turn.pause()
                yield finished
                turn.go_on()
        finally:
            try:
                clear()
            finally:
                self._stats.live = 0
                self._turns.give_back(turn)

    def _count(self) -> None:
        s, target, scheduler = self._stats, self._target, self._scheduler
        s.target_passes, s.rows = target.passes, target.rows
        s.draft_passes = sum(runner.passes for runner in self._drafting)
        s.reused_tokens, s.preemptions = scheduler.reused, scheduler.preemptions


def _taken(sequences: Iterator[Sequence | None], wanted: int) -> tuple[list[Sequence], bool]:
    """Return up to `wanted` sequences that are available now, and whether more may come."""
    taken: list[Sequence] = []
    for seq in islice(sequences, wanted):
        if seq is None:
            return taken, True
        taken.append(seq)
    return taken, len(taken) == wanted
