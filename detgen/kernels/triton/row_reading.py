"""Reads all rows of logits once: finds the largest, the runner-up, and the sum of their probabilities.

Promise: the results for a row depend only on its logits and its adjustment. The sum has the bits of docs/numerics.md:
blocks of 128 entries in sixteen lanes, then the blocks in sixteen lanes, each folded. A program takes SECTION entries
of a row at multiples of SECTION, whatever the number of rows; no two programs write to the same place.

Adjusted rows are written to a copy for the next launches; log-probabilities are those of the unadjusted logits. Memory
is read once, and written once for adjusted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.penalties import Adjustment
from detgen.kernels.triton.float_functions import exponential, fold, logarithm
from detgen.kernels.triton.launching import OPTIONS, sent

SECTION = 4096  # entries of a row per program

TEMPERATURE: tl.constexpr = tl.constexpr(0)  # rows of the table of parameters
TOP_P: tl.constexpr = tl.constexpr(1)
FLOOR: tl.constexpr = tl.constexpr(2)
TOP_K: tl.constexpr = tl.constexpr(3)
SEED: tl.constexpr = tl.constexpr(4)
SAMPLE: tl.constexpr = tl.constexpr(5)
POSITION: tl.constexpr = tl.constexpr(6)
INVERSE: tl.constexpr = tl.constexpr(7)
_BLOCK = 128  # entries of a row whose sum is folded on its own
_MANY = 128  # entries of an adjustment processed at once


@triton.jit
def peak_of(best, row, sections, SECTIONS: tl.constexpr):
    """Return the largest of a row's adjusted logits."""
    at = tl.arange(0, SECTIONS)
    return tl.max(tl.load(best + row * sections + at, mask=at < sections, other=float("-inf")), 0)


@triton.jit
def parameter(table, rows, row, WHICH: tl.constexpr):
    """Return a float64 parameter of a row."""
    return tl.load(table + WHICH * rows + row).to(tl.float64, bitcast=True)


@triton.jit
def sampled(table, rows, row, peak):
    """Return whether a row is sampled: it has a temperature, and its largest logit is finite."""
    warm = parameter(table, rows, row, TEMPERATURE) > 0
    return warm & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def source_of(logits, copies, bounds, row, stride, vocabulary, ADJUSTS: tl.constexpr):
    """Return the address of a row's adjusted logits."""
    source = logits + row * stride
    if ADJUSTS:  # noqa: SIM102 (known when this is compiled, as the other is not)
        if tl.load(bounds + 2 * row) < tl.load(bounds + 2 * row + 1):
            source = copies + row * vocabulary
    return source


class Lists(NamedTuple):
    """The adjustments of all rows.

    Attributes:
        bounds: int64 [rows, 2], begin and end of each row's entries.
        ids: int32 [entries]; ids beyond the vocabulary are ignored, since a draft model's may be smaller.
        terms: float32 [5, entries], see `Adjustment`.
    """

    bounds: torch.Tensor
    ids: torch.Tensor
    terms: torch.Tensor

    @classmethod
    def of(cls, adjustments: Sequence[Adjustment | None]) -> Lists:
        """Convert from one adjustment per row, None for none."""
        lists = [None if a is None else a.listed() for a in adjustments]
        some = [a for a in lists if a is not None]
        ends = np.cumsum([0, *(0 if a is None else len(a[0]) for a in lists)])
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in some)]).astype(np.int32)
        terms = np.concatenate([np.zeros((5, 0), np.float32), *(terms for _, terms in some)], 1)
        return cls(*map(torch.from_numpy, (np.stack([ends[:-1], ends[1:]], 1), ids, terms)))

    def to(self, device: torch.device | str) -> Lists:
        """Return the adjustments on a device."""
        return Lists(*(sent(x, device) for x in self))


class Read(NamedTuple):
    """The results for rows, on their device.

    Attributes:
        tops: float32 [rows, blocks], the largest logit of each block.
        totals: float32 [rows, blocks], the sum of e^(logit - largest) of each block.
        best: float32 [rows, sections], the largest logit of each section, adjusted, like all that follows.
        places: int32 [rows, sections], its first entry.
        seconds: float32 [rows, sections], the largest of the others.
        broken: int32 [rows, sections], whether some logit is NaN.
        copies: float32 [rows, vocabulary], the adjusted logits of adjusted rows; the logits themselves if no row is
            adjusted.
        bounds: of the adjustments.
    """

    tops: torch.Tensor
    totals: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    seconds: torch.Tensor
    broken: torch.Tensor
    copies: torch.Tensor
    bounds: torch.Tensor


@triton.jit
def _adjusted(x, at, there, row, source, copy, bounds, ids, terms, entries, low, high, MANY: tl.constexpr):
    """Return entries `low` to `high` of a row after its adjustment, one rounding per step: see `penalties.reference`.

    Barriers separate writing the copy, changing its entries, and reading it.
    """
    first, last = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    if first < last:
        tl.store(copy + at, x, mask=there)
        tl.debug_barrier()
        for start in range(first, last, MANY):
            entry = start + tl.arange(0, MANY)
            id = tl.load(ids + entry, mask=entry < last, other=-1)
            mine = (id >= low) & (id < high)
            y = tl.load(source + id, mask=mine, other=0.0) + tl.load(terms + entry, mask=mine, other=0.0)
            factor = tl.load(terms + entries + entry, mask=mine, other=1.0)
            y = tl.where(y < 0, y * factor, tl.div_rn(y, factor))
            y = y - tl.load(terms + 2 * entries + entry, mask=mine, other=0.0)
            y = y - tl.load(terms + 3 * entries + entry, mask=mine, other=0.0)
            most = tl.load(terms + 4 * entries + entry, mask=mine, other=0.0)
            tl.store(copy + id, tl.where(y > most, most, y), mask=mine)
        tl.debug_barrier()
        x = tl.load(copy + at, mask=there, other=float("-inf"))
    return x


@triton.jit
def _read(
    logits,
    copies,
    bounds,
    ids,
    terms,
    tops,
    totals,
    best,
    places,
    seconds,
    broken,
    stride,
    entries,
    vocabulary,
    sections,
    blocks,
    ADJUSTS: tl.constexpr,
    SECTION: tl.constexpr,
    MANY: tl.constexpr,
):
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = logits + row * stride
    block = tl.arange(0, SECTION // 128)
    place = section * SECTION + block[:, None] * 128 + tl.arange(0, 16)[None, :]
    top = tl.full((SECTION // 128, 16), float("-inf"), tl.float32)
    for step in tl.static_range(8):
        there = place + 16 * step < vocabulary
        top = tl.maximum(top, tl.load(source + place + 16 * step, mask=there, other=float("-inf")))
    largest = tl.max(top, 1)
    shift = tl.where(largest > float("-inf"), largest, 0.0)[:, None]
    total = tl.zeros((SECTION // 128, 16), tl.float32)
    for step in tl.static_range(8):
        there = place + 16 * step < vocabulary
        total += exponential(tl.load(source + place + 16 * step, mask=there, other=float("-inf")) - shift)
    to = section * (SECTION // 128) + block
    tl.store(tops + row * blocks + to, largest, mask=to < blocks)
    tl.store(totals + row * blocks + to, fold(total, SECTION // 128), mask=to < blocks)

    at = section * SECTION + tl.arange(0, SECTION)
    there = at < vocabulary
    x = tl.load(source + at, mask=there, other=float("-inf"))
    if ADJUSTS:
        low, high = section * SECTION, tl.minimum((section + 1) * SECTION, vocabulary)
        copy = copies + row * vocabulary
        x = _adjusted(x, at, there, row, source, copy, bounds, ids, terms, entries, low, high, MANY)
    none = x != x
    x = tl.where(none, float("-inf"), x)
    most = tl.max(x, 0)
    found = tl.min(tl.where(x == most, at, vocabulary), 0)
    tl.store(best + row * sections + section, most)
    tl.store(places + row * sections + section, found)
    tl.store(seconds + row * sections + section, tl.max(tl.where(at == found, float("-inf"), x), 0))
    tl.store(broken + row * sections + section, tl.max(none.to(tl.int32), 0))


@triton.jit
def log_total(tops, totals, blocks):
    """Return a row's largest logit, and log(sum of e^(x - largest)), from its blocks' tops and totals."""
    lane = tl.arange(0, 16)
    high = tl.full((16,), float("-inf"), tl.float32)
    for start in range(0, blocks, 128):
        for step in tl.static_range(8):
            at = start + 16 * step + lane
            high = tl.maximum(high, tl.load(tops + at, mask=at < blocks, other=float("-inf")))
    largest = tl.max(high, 0)
    total = tl.zeros((16,), tl.float32)
    for start in range(0, blocks, 128):
        for step in tl.static_range(8):
            at = start + 16 * step + lane
            top = tl.load(tops + at, mask=at < blocks, other=float("-inf"))
            total += tl.load(totals + at, mask=at < blocks, other=0.0) * exponential(top - largest)
    folded = tl.sum(fold(tl.reshape(total, (1, 16)), 1), 0)
    return largest, logarithm(folded.to(tl.float64)).to(tl.float32)


def read(logits: torch.Tensor, lists: Lists | None) -> Read:
    """Read all rows once; arguments as for `sampling.choose`."""
    rows, vocabulary = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert vocabulary < 1 << 19  # so that sums of shares stay below 2^63
    sections, blocks = triton.cdiv(vocabulary, SECTION), triton.cdiv(vocabulary, _BLOCK)

    def made(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    found = Read(
        *(made(blocks, torch.float32), made(blocks, torch.float32), made(sections, torch.float32)),
        *(made(sections, torch.int32), made(sections, torch.float32), made(sections, torch.int32)),
        logits if lists is None else made(vocabulary, torch.float32),
        logits if lists is None else lists.bounds,
    )
    ids, terms, entries = (logits, logits, 0) if lists is None else (lists.ids, lists.terms, len(lists.ids))
    _read[(rows, sections)](
        *(logits, found.copies, found.bounds, ids, terms),
        *(found.tops, found.totals, found.best, found.places, found.seconds, found.broken),
        *(logits.stride(0), entries, vocabulary, sections, blocks, lists is not None, SECTION, _MANY),
        **OPTIONS,
    )
    return found
