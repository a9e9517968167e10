"""Reads the prompts of a thinking model ahead, before the thoughts of earlier chunks are known.

A pass may read further chunks after the one whose state is known, as if none in between thought. Afterwards, everything
up to the end of the first chunk that did think is kept, and the rest is read again: the speculative prefill of Thinking
States (Amos et al., arXiv 2602.08332). This is decode, verify and roll back at the level of chunks. Affects only speed.

The rows of a correct chunk would have been read later anyway, so reading it ahead saves its share of a pass; a wrong
chunk costs its rows. With p the probability that no chunk before it thinks, reading a chunk ahead pays if p / (1 - p)
is more than `_DEAR` times the rows that the pass has anyway, divided by the rows that cost as much as the pass itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from detgen.engine.running_batch import RunningBatch
from detgen.engine.stats import EngineStats
from detgen.kernels.input_batch import Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.pass_cost import PassCost
from detgen.program.arrays import Array

if TYPE_CHECKING:
    from detgen.runner.slot_thoughts import Thinking

Results: TypeAlias = "Array | Scores"  # of a pass

_MOST = 1 << 30  # chunks
_FADE = 0.8  # weight of earlier chunks, relative to the next one, in a sequence's rate of thoughts
_RARELY = 1e-3  # least rate of thoughts
_DEAR = 3  # cost of a row relative to its cost in the pass: T reads it, too


class ReadingAhead:
    """Decides how many chunks sequences read ahead, and which of their rows are kept.

    Args:
        setting: auto, off, or a fixed number of chunks.
        thinking: thoughts and states of the slots.
        cost: cost of a pass.

    Attributes:
        thinking: as above.
    """

    def __init__(self, setting: str | int, thinking: Thinking, cost: PassCost) -> None:
        self.thinking = thinking
        self._cost = cost
        self._fixed = None if setting == "auto" else 0 if setting == "off" else int(setting)

    def ends(self, cached: np.ndarray, rates: np.ndarray, others: int) -> np.ndarray:
        """Return the position up to which each sequence is read next.

        Args:
            cached: int64 [n], positions that each sequence has read.
            rates: float64 [n], share of each sequence's last chunks that thought.
            others: rows of the pass that do not read prompts.
        """
        ends = self.thinking.reach(cached)
        if self._fixed is not None:
            ends += min(self._fixed, _MOST) * self.thinking.chunk
            return ends
        rows = others + int((ends - cached).sum())
        least = _DEAR * rows / (_DEAR * rows + self._cost.fixed_rows())
        ahead = np.log(least) / np.log1p(-np.clip(rates, _RARELY, 1 - _RARELY))
        ends += ahead.astype(np.int64) * self.thinking.chunk
        return ends

    def settle(
        self, live: RunningBatch, windows: Windows, results: Results, broken: list[int], stats: EngineStats
    ) -> tuple[Windows, Results, list[int]]:
        """Let the sequences think about what a pass has read.

        Args:
            live: the live sequences.
            windows: the windows of the pass.
            results: its logits, float32 [sum of the windows' `logits`, vocabulary], or their scores.
            broken: its rows that are not finite.
            stats: counters to update.

        Returns:
            The windows, results and broken rows that are kept.
        """
        reading = live.reading[windows.slots].nonzero()[0]
        if not len(reading):
            return windows, results, broken
        chunk, thoughts = self.thinking.chunk, self.thinking.thoughts
        slots, starts = windows.slots[reading], windows.starts[reading]
        ends = starts + windows.lengths[reading]
        kept = self.thinking.keep(slots, ends)
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            if found := thoughts[slot][start // chunk :]:
                faded = _FADE ** len(found)
                live.thinks[slot] = faded * live.thinks[slot] + (1 - _FADE) * bool(found[-1])
        stats.prefill_rounds += len(reading)
        stats.passes_saved += int((-(-kept // chunk) - starts // chunk - 1).sum())
        if (kept == ends).all():
            return windows, results, broken
        lengths = windows.lengths.copy()
        lengths[reading] = kept - starts
        return cut(windows, lengths, results, broken)


def cut(
    windows: Windows, lengths: np.ndarray, results: Results, broken: list[int]
) -> tuple[Windows, Results, list[int]]:
    """Cut a pass to the first `lengths`, int64 [windows], rows of each window.

    The results are those of the last rows of each window.
    """
    asked = np.maximum(windows.logits - (windows.lengths - lengths), 0)
    positions, end = windows.positions, windows.starts + windows.lengths
    stands = positions < np.repeat(windows.starts + lengths, windows.lengths)
    has_logits = positions >= np.repeat(end - windows.logits, windows.lengths)
    left = Windows(windows.slots, windows.starts, lengths, asked, windows.tokens[stands])
    wanted = stands[has_logits]
    results = results.only(wanted) if isinstance(results, Scores) else results[wanted]
    places = stands.cumsum() - 1
    return left, results, [int(places[row]) for row in broken if stands[row]]
