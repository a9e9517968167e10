"""Adjustments in consecutive passes that continue with their choices: penalties are counted on the device.

Promise: the entries of a row are those of `Adjuster.after` for the tokens before it, with the same bits, besides free
ones, which adjust nothing. A row's program writes to no other row's entries.

In rounds that draft, a row's entries are a copy of its sequence's, in which the draft before the row is counted, too;
the sequence's own count what stands.
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
def _learn(ids, terms, counts, entries, first, last, token, how, sequences, sequence, MANY: tl.constexpr):
    """Count a token in the entries first..last-1, in its own or in the first free one."""
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
    tl.store(terms + entries + place, tl.load(how + sequence))
    tl.store(terms + 2 * entries + place, count * tl.load(how + sequences + sequence))
    tl.store(terms + 3 * entries + place, tl.load(how + 2 * sequences + sequence))


@triton.jit
def _grow(ids, terms, counts, bounds, learners, late, tokens, how, entries, sequences, MANY: tl.constexpr):
    row = tl.program_id(0)
    first, last = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    learner = tl.load(learners + row)
    if learner >= 0:
        token = tl.load(tokens + row).to(tl.int32)
        _learn(ids, terms, counts, entries, first, last, token, how, sequences, learner, MANY)
    if tl.load(late + row) > 0:
        for start in range(first, last, MANY):
            entry = start + tl.arange(0, MANY)
            tl.store(terms + 4 * entries + entry, tl.full((MANY,), float("inf"), tl.float32), mask=entry < last)


@triton.jit(do_not_specialize=("width", "length", "tokens"))
def _draft(
    ids,
    terms,
    counts,
    own_ids,
    own_terms,
    own_counts,
    layout,
    sheet,
    how,
    width,
    length,
    tokens,
    entries,
    own_entries,
    sequences,
    MANY: tl.constexpr,
):
    of = layout + 7 * tl.program_id(0)
    first, last, origin = tl.load(of), tl.load(of + 1), tl.load(of + 2)
    sequence, depth, learns, end = tl.load(of + 3), tl.load(of + 4), tl.load(of + 5), tl.load(of + 6)
    of = sheet + sequence * width
    late = tl.load(of + length) + depth >= end
    for start in range(first, last, MANY):
        entry = start + tl.arange(0, MANY)
        there, own = entry < last, entry - first + origin
        tl.store(ids + entry, tl.load(own_ids + own, mask=there, other=0), mask=there)
        tl.store(counts + entry, tl.load(own_counts + own, mask=there, other=0.0), mask=there)
        for term in tl.static_range(5):
            x = tl.load(own_terms + term * own_entries + own, mask=there, other=0.0)
            if term == 4:
                x = tl.where(late, float("inf"), x)
            tl.store(terms + term * entries + entry, x, mask=there)
    if learns > 0:
        for at in range(0, depth):
            tl.debug_barrier()  # what was counted before can be read
            token = tl.maximum(tl.load(of + tokens + at), 0).to(tl.int32)
            _learn(ids, terms, counts, entries, first, last, token, how, sequences, sequence, MANY)


@triton.jit(do_not_specialize=("width", "length"))
def _stand(
    ids,
    terms,
    counts,
    layout,
    sheet,
    before,
    packed,
    how,
    width,
    length,
    stride,
    entries,
    sequences,
    MANY: tl.constexpr,
):
    of = layout + 5 * tl.program_id(0)
    first, last, sequence = tl.load(of), tl.load(of + 1), tl.load(of + 2)
    row, learns = tl.load(of + 3), tl.load(of + 4)
    committed = tl.load(sheet + sequence * width + length) - tl.load(before + sequence * width + length)
    if learns > 0:
        for at in range(0, committed):
            tl.debug_barrier()
            token = tl.maximum(tl.load(packed + (row + at) * stride + 3), 0)
            _learn(ids, terms, counts, entries, first, last, token, how, sequences, sequence, MANY)


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


class DraftedLists:
    """The adjustments of sequences in rounds, on a device.

    Args:
        own: those of the sequences as their first round begins, with free entries for all that the rounds may count.
        ends: int64 [sequences], the length from which on bans do not hold any more.
        length: column of the lengths in a sheet.
        tokens: column of the first drafted token.
    """

    def __init__(self, own: GrowingLists, ends: np.ndarray, length: int, tokens: int) -> None:
        self._own, self._ends, self._columns = own, ends, (length, tokens)
        self._layouts: dict[object, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._windows: dict[object, torch.Tensor] = {}

    def of(self, one: object, owner: np.ndarray, depth: np.ndarray, sheet: torch.Tensor) -> Lists:
        """Return the adjustments of the rows of a pass.

        Args:
            one: the pass.
            owner: int64 [rows], the sequence of each.
            depth: int64 [rows], how many drafted tokens are before it.
            sheet: int64 [sequences, columns].
        """
        own, device = self._own, sheet.device
        if one not in self._layouts:
            begins, ends = own.bounds[owner].T
            last = (ends - begins).cumsum()
            bounds = np.stack([last - (ends - begins), last], 1)
            layout = np.column_stack([bounds, begins, owner, depth, own.learns[owner], self._ends[owner]])
            on_device = (sent(torch.from_numpy(x), device) for x in (layout, bounds))
            self._layouts[one] = (next(on_device), next(on_device), int(last[-1]))
        there, bounds_there, size = self._layouts[one]
        ids = torch.empty(size, dtype=torch.int32, device=device)
        terms, counts = (torch.empty(*shape, size, device=device) for shape in ((5,), ()))
        _draft[(len(owner),)](
            *(ids, terms, counts, own.ids, own.terms, own.counts, there, sheet, own.how, sheet.shape[1]),
            *(*self._columns, size, len(own.ids), len(own.learns), _MANY),
            **OPTIONS,
        )
        return Lists(bounds_there, ids, terms)

    def stand(
        self,
        one: object,
        which: np.ndarray,
        rows: np.ndarray,
        sheet: torch.Tensor,
        before: torch.Tensor,
        packed: torch.Tensor,
    ) -> None:
        """Count what was committed of the windows of a pass.

        Args:
            one: the pass.
            which: int64 [windows], their sequences.
            rows: int64 [windows], the first row of each.
            sheet: int64 [sequences, columns], after the verdict.
            before: likewise, before it.
            packed: as from `sampling_kernels.choose`.
        """
        own = self._own
        if one not in self._windows:
            layout = np.column_stack([own.bounds[which], which, rows, own.learns[which]])
            self._windows[one] = sent(torch.from_numpy(layout), sheet.device)
        _stand[(len(which),)](
            *(own.ids, own.terms, own.counts, self._windows[one], sheet, before, packed, own.how, sheet.shape[1]),
            *(self._columns[0], packed.shape[1], len(own.ids), len(own.learns), _MANY),
            **OPTIONS,
        )
