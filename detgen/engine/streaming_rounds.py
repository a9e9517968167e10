"""A stream: sequences are taken as there is room for them, and run round by round until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.turns import Turns
from detgen.kernels.c.threads import use_threads
from detgen.runner.model_runner import ModelRunner

_Done = TypeVar("_Done")


class StreamingRounds:
    """Runs the sequences of one call at a time, and counts what their rounds took.

    Args:
        turns: say which call may run.
        scheduler: runs the sequences.
        stats: are brought up to date after each round.
        target: passes of the target.
        drafting: those that draft.
        threads: of passes; None leaves them as they are.
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
            sequences: those that are to run; None where there is no other yet.
            refused: what has ended without running, which is forgotten when it is yielded.
            step: runs a round, and gives what it finished.
            clear: forgets what has not ended, in the end.

        Yields:
            After each round, what was refused and what the round finished.

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
    """As many sequences as are wanted, or as there are by now; and whether others may come."""
    taken: list[Sequence] = []
    for seq in islice(sequences, wanted):
        if seq is None:
            return taken, True
        taken.append(seq)
    return taken, len(taken) == wanted
