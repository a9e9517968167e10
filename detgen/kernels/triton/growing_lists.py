"""Adjustments in consecutive passes that continue with their choices: penalties are counted on the device.

Promise: the entries of a row are those of `Adjuster.after` for the tokens before it, with the same bits, besides free
ones, which adjust nothing. A row's program writes to no other row's entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.penalties import Growing
from detgen.kernels.triton.launching import OPTIONS, sent
from detgen.kernels.triton.row_reading import Lists

_MANY = 128  # entries processed at once


@triton.jit
def _grow(ids, terms, counts, bounds, learners, late, tokens, how, entries, sequences, MANY: tl.constexpr):
    row = tl.program_id(0)
    first, last = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    learner = tl.load(learners + row)
    if learner >= 0:
        token = tl.load(tokens + row).to(tl.int32)
        known, free = last, last
        for start in range(first, last, MANY):
            entry = start + tl.arange(0, MANY)
            id = tl.load(ids + entry, mask=entry < last, other=-2)
            known = tl.minimum(known, tl.min(tl.where(id == token, entry, last), 0))
            free = tl.minimum(free, tl.min(tl.where(id == -1, entry, last), 0))
        place = tl.where(known < last, known, free)
        count = tl.load(counts + place) + 1
        tl.store(ids + place, token)
        tl.store(counts + place, count)
        tl.store(terms + entries + place, tl.load(how + learner))
        tl.store(terms + 2 * entries + place, count * tl.load(how + sequences + learner))
        tl.store(terms + 3 * entries + place, tl.load(how + 2 * sequences + learner))
    if tl.load(late + row) > 0:
        for start in range(first, last, MANY):
            entry = start + tl.arange(0, MANY)
            tl.store(terms + 4 * entries + entry, tl.full((MANY,), float("inf"), tl.float32), mask=entry < last)


class GrowingLists(NamedTuple):
    """The adjustments of several sequences in a call, on a device.

    Attributes:
        bounds: int64 [sequences, 2], begin and end of each sequence's entries, on the CPU.
        learns: bool [sequences], whether its choices are counted.
        left: int64 [sequences], number of its first passes in which bans hold.
        ids: int32 [entries]; -1 for free entries, as many as a sequence may need.
        terms: float32 [5, entries], see `Adjustment`.
        counts: float32 [entries], how often each occurs in the completion.
        how: float32 [3, sequences], terms 1 to 3 of a token that occurred, per occurrence.
    """

    bounds: np.ndarray
    learns: np.ndarray
    left: np.ndarray
    ids: torch.Tensor
    terms: torch.Tensor
    counts: torch.Tensor
    how: torch.Tensor

    @classmethod
    def of(cls, growing: Sequence[Growing | None], passes: np.ndarray, device: torch.device) -> GrowingLists:
        """Convert from one per sequence, None for no adjustment, and the number of passes that each takes part in."""
        known = np.array([0 if g is None else len(g.ids) for g in growing], np.int64)
        learns = np.array([g is not None and g.penalties.counted for g in growing])
        sizes = known + np.where(learns, passes, 0)
        ends = sizes.cumsum()
        ids, counts = np.full(ends[-1], -1, np.int32), np.zeros(ends[-1], np.float32)
        terms = np.zeros((5, ends[-1]), np.float32)
        terms[1], terms[4] = 1, np.inf
        how = np.zeros((3, len(growing)), np.float32)
        for i, (g, start, n) in enumerate(zip(growing, (ends - sizes).tolist(), known.tolist(), strict=True)):
            if g is not None:
                part = slice(start, start + n)
                ids[part], counts[part], terms[:, part] = g.ids, g.counts, g.terms
                how[:, i] = g.penalties.repetition, g.penalties.frequency, g.penalties.presence
        left = np.array([0 if g is None else g.left for g in growing], np.int64)
        on_device = (sent(torch.from_numpy(x), device) for x in (ids, terms, counts, how))
        return cls(np.stack([ends - sizes, ends], 1), learns, left, *on_device)

    def after(self, there: np.ndarray, depth: np.ndarray, tokens: torch.Tensor) -> Lists:
        """Return the adjustments of a pass, after counting the tokens that its rows read.

        Args:
            there: int64 [rows], the sequences of the rows.
            depth: int64 [rows], the number of earlier passes in which each chose; those with none come last.
            tokens: int64 [rows that chose before], their last choices.
        """
        rows = len(there)
        learners, late = np.where(self.learns[there] & (depth > 0), there, -1), depth == self.left[there]
        table = sent(torch.from_numpy(np.concatenate([self.bounds[there].ravel(), learners, late])), self.ids.device)
        bounds, learners_there, late_there = table.split([2 * rows, rows, rows])
        _grow[(rows,)](
            *(self.ids, self.terms, self.counts, bounds, learners_there, late_there, tokens, self.how),
            *(len(self.ids), len(self.learns), _MANY),
            **OPTIONS,
        )
        return Lists(bounds.view(rows, 2), self.ids, self.terms)
