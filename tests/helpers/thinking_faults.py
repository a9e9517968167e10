"""A thinking model's engine broken on purpose, in one way each, as in `faults`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from detgen.kernels.input_batch import Windows
from detgen.runner.slot_thoughts import Thinking, Thought
from detgen.runner.thinker import Thinker

Patch = pytest.MonkeyPatch


def state_a_chunk_late(patch: Patch) -> None:
    """A thought's state is added one chunk later than it should be."""
    _settled(patch, lambda self, known: self._state(known[:-1]))


def state_not_rolled_back(patch: Patch) -> None:
    """A chunk that is filled by drafts thinks and leaves its state, whatever becomes of the drafts."""
    keep = Thinking.keep

    def faulty(self: Thinking, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        windows = (self._windows.get(slot, (end, ())) for slot, end in zip(slots.tolist(), ends.tolist(), strict=True))
        drafted = np.array([start + len(rows) for start, rows in windows], np.int64)
        return np.minimum(keep(self, slots, np.maximum(ends, drafted)), ends)

    patch.setattr(Thinking, "keep", faulty)


def thought_from_rejected_rows(patch: Patch) -> None:
    """Of a chunk whose rows come from several passes, T reads those of a rejected draft."""
    keep = Thinking.keep
    rejected: dict[int, dict[int, torch.Tensor]] = {}  # by slot, by position

    def faulty(self: Thinking, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            start, rows = self._windows[slot]
            old = rejected.setdefault(slot, {})
            behind = {start + i: row.clone() for i, row in enumerate(rows) if start + i >= end}
            taken = [old.pop(start + i, row) if start + i < end else row for i, row in enumerate(rows)]
            self._windows[slot] = start, torch.stack(taken)
            old.update(behind)
        return keep(self, slots, ends)

    start = Thinking.start

    def started(self: Thinking, slot: int, cached: int) -> None:
        rejected.pop(slot, None)
        start(self, slot, cached)

    patch.setattr(Thinking, "keep", faulty)
    patch.setattr(Thinking, "start", started)


def prefix_without_thoughts(patch: Patch) -> None:
    """Pages are shared, and what their chunks thought is not."""
    start = Thinking.start

    def faulty(self: Thinking, slot: int, cached: int) -> None:
        start(self, slot, cached)
        self.thoughts[slot] = [() for _ in self.thoughts[slot]]
        self._states[slot] = self._state(self.thoughts[slot])

    patch.setattr(Thinking, "start", faulty)


def one_chunk_too_many(patch: Patch) -> None:
    """Of a prompt that was read ahead, the chunk behind the first one that thinks is kept, too."""
    settle = Thinking._settle

    def faulty(self: Thinking, slot: int, end: int, found: list[Thought | None]) -> int:
        stands = settle(self, slot, end, found)
        if end < stands + self.chunk:
            return stands
        self.thoughts[slot].append(())
        self._kept[slot] = stands + self.chunk
        return stands + self.chunk

    patch.setattr(Thinking, "_settle", faulty)


def cache_not_cut_between_chunks(patch: Patch) -> None:
    """T sees the rows of the chunk that had its page before."""
    begin, best = Thinker._begin, Thinker._best
    later: dict[int, bool] = {}  # by slot: whether its rows stand behind those of another chunk

    def began(self: Thinker, chunks: torch.Tensor) -> list[int]:
        for slot in range(len(chunks)):
            later[slot] = not later.get(slot, True)
        return begin(self, chunks)

    def faulty(self: Thinker, windows: Windows, rows: torch.Tensor | None = None) -> list[int]:
        behind = np.array([self.chunk * later[slot] for slot in windows.slots.tolist()])
        starts = windows.starts + behind
        moved = Windows(windows.slots, starts, windows.lengths, windows.logits, windows.tokens)
        return best(self, moved, rows)

    patch.setattr(Thinker, "_begin", began)
    patch.setattr(Thinker, "_best", faulty)


def empty_state_mixed_up(patch: Patch) -> None:
    """After a chunk that thinks nothing the state is zero where it should stay, and stays where it should be zero."""

    def faulty(self: Thinking, thoughts: list[Thought]) -> torch.Tensor:
        last = (thoughts or [()])[-1] if self.thinker.keeps else next(filter(None, reversed(thoughts)), ())
        return self.thinker.state(last)

    patch.setattr(Thinking, "_state", faulty)
    _settled(patch, faulty)


def _settled(patch: Patch, state: Callable[[Thinking, list[Thought]], torch.Tensor]) -> None:
    """Let a function give the state that follows what a slot's chunks thought."""
    settle = Thinking._settle

    def faulty(self: Thinking, slot: int, end: int, found: list[Thought | None]) -> int:
        stands = settle(self, slot, end, found)
        self._states[slot] = state(self, self.thoughts[slot])
        return stands

    patch.setattr(Thinking, "_settle", faulty)


THINKING_FAULTS: dict[str, Callable[[Patch], None]] = {
    f.__name__: f
    for f in (
        state_a_chunk_late,
        state_not_rolled_back,
        thought_from_rejected_rows,
        prefix_without_thoughts,
        one_chunk_too_many,
        cache_not_cut_between_chunks,
        empty_state_mixed_up,
    )
}
