"""Finds where top_k and top_p cut a row: by buckets, then by dividing a range, without sorting.

Promise: the kept entries are those of `filters.kept`. Entries are counted, and their shares of the probability are
whole numbers: such sums are the same in every order.

Three launches. The first puts a row's entries into BUCKETS: eight of equal width reach from the largest logit to the
least of the sections' largest, the others continue below. It sums the buckets of each section, SECTION entries at
multiples of SECTION. These sums show in which buckets the row can be cut; the second launch lists the entries of these
buckets, ascending. The third, one program per row, repeatedly narrows the range of this list's logits to an eighth
until one is left: first for top_k, then for top_p, whose total is what top_k keeps. Then it finds the last tie that is
kept. The first two launches read the row once each, the third its list, up to 11 times per filter and twice more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import share
from detgen.kernels.triton.launching import OPTIONS, above
from detgen.kernels.triton.row_reading import (
    INVERSE,
    SECTION,
    TOP_K,
    TOP_P,
    Read,
    parameter,
    peak_of,
    sampled,
    source_of,
)

BUCKETS = 32
_TILE = 512  # entries of a list processed at once
_PIVOTS = 8  # pivots that divide the range of a boundary


@triton.jit
def divided(table, rows, row, vocabulary):
    """Return whether top_k or top_p can drop entries of a row."""
    top_k = tl.load(table + TOP_K * rows + row)
    return ((top_k > 0) & (top_k < vocabulary)) | (parameter(table, rows, row, TOP_P) < 1)


@triton.jit
def key(x):
    """Return an int32 that orders like the float32; zeros of both signs are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(bound):
    """Return the float32 with a given key, int64."""
    bits = bound.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _bucket(x, best, row, sections, SECTIONS: tl.constexpr, BUCKETS: tl.constexpr):
    """Return the bucket of each logit; 0 has the largest. Eight buckets reach to the least of the sections' largest."""
    at = tl.arange(0, SECTIONS)
    peak = peak_of(best, row, sections, SECTIONS)
    least = tl.min(tl.load(best + row * sections + at, mask=at < sections, other=float("inf")), 0)
    reach = tl.minimum(tl.maximum(peak - least, 0.001), 64.0)
    return tl.minimum((peak - x) * tl.div_rn(tl.full((), 8.0, tl.float32), reach), BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _shares(x, peak, inverse):
    return share((x - peak) * inverse.to(tl.float32))


@triton.jit
def _cut(top_p, total):
    """Return the least whole number that is at least top_p of the total, and at least 1."""
    limit = top_p * total.to(tl.float64)
    whole = limit.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < limit).to(tl.int64), 1)


@triton.jit(do_not_specialize=("rows",))
def _weigh(
    logits,
    copies,
    bounds,
    table,
    best,
    counts,
    masses,
    stride,
    rows,
    vocabulary,
    sections,
    ADJUSTS: tl.constexpr,
    SECTION: tl.constexpr,
    SECTIONS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = peak_of(best, row, sections, SECTIONS)
    if sampled(table, rows, row, peak) & divided(table, rows, row, vocabulary):
        source = source_of(logits, copies, bounds, row, stride, vocabulary, ADJUSTS)
        at = section * SECTION + tl.arange(0, SECTION)
        x = tl.load(source + at, mask=at < vocabulary, other=float("-inf"))
        bucket = tl.where(at < vocabulary, _bucket(x, best, row, sections, SECTIONS, BUCKETS), BUCKETS)
        mass = tl.zeros((SECTION,), tl.int64)
        if parameter(table, rows, row, TOP_P) < 1:
            mass = _shares(x, peak, parameter(table, rows, row, INVERSE))
        to = (row * sections + section) * BUCKETS
        for j in range(BUCKETS):
            tl.store(counts + to + j, tl.sum((bucket == j).to(tl.int32), 0))
            tl.store(masses + to + j, tl.sum(tl.where(bucket == j, mass, 0), 0))


@triton.jit
def _span(counts, masses, table, rows, row, vocabulary, sections, SECTIONS: tl.constexpr, BUCKETS: tl.constexpr):
    """Return the first and last bucket in which a row can be cut, the entries and shares before them, the number of
    their entries, and all shares of the row."""
    at, j = tl.arange(0, SECTIONS), tl.arange(0, BUCKETS)
    place = (row * sections + at[:, None]) * BUCKETS + j[None, :]
    here = (at < sections)[:, None]
    number = tl.cumsum(tl.sum(tl.load(counts + place, mask=here, other=0), 0).to(tl.int64), 0)
    weight = tl.cumsum(tl.sum(tl.load(masses + place, mask=here, other=0), 0), 0)
    total = tl.max(weight, 0)
    top_k, top_p = tl.load(table + TOP_K * rows + row), parameter(table, rows, row, TOP_P)
    limited = (top_k > 0) & (top_k < vocabulary)
    last = tl.sum((number < top_k).to(tl.int32), 0)
    known = tl.where(limited, tl.max(tl.where(j < last, weight, 0), 0), total)  # what top_k keeps at least
    first = tl.minimum(tl.sum((weight < _cut(top_p, known)).to(tl.int32), 0), BUCKETS - 1)
    last = tl.where(limited, last, first)
    first = tl.where(top_p < 1, tl.minimum(first, last), last)
    counted = tl.max(tl.where(j < first, number, 0), 0)
    weighed = tl.max(tl.where(j < first, weight, 0), 0)
    size = tl.max(tl.where(j <= last, number, 0), 0) - counted
    return first, last, counted, weighed, size, total


@triton.jit(do_not_specialize=("rows",))
def _list(
    logits,
    copies,
    bounds,
    table,
    best,
    counts,
    masses,
    listed,
    stride,
    rows,
    vocabulary,
    sections,
    ADJUSTS: tl.constexpr,
    SECTION: tl.constexpr,
    SECTIONS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = peak_of(best, row, sections, SECTIONS)
    if sampled(table, rows, row, peak) & divided(table, rows, row, vocabulary):
        first, last, _, _, _, _ = _span(counts, masses, table, rows, row, vocabulary, sections, SECTIONS, BUCKETS)
        others, j = tl.arange(0, SECTIONS), tl.arange(0, BUCKETS)
        place = (row * sections + others[:, None]) * BUCKETS + j[None, :]
        earlier = (others < section)[:, None] & ((j >= first) & (j <= last))[None, :]
        before = tl.sum(tl.sum(tl.load(counts + place, mask=earlier, other=0), 1), 0)
        source = source_of(logits, copies, bounds, row, stride, vocabulary, ADJUSTS)
        at = section * SECTION + tl.arange(0, SECTION)
        x = tl.load(source + at, mask=at < vocabulary, other=float("-inf"))
        bucket = _bucket(x, best, row, sections, SECTIONS, BUCKETS)
        inside = (bucket >= first) & (bucket <= last) & (at < vocabulary)
        place = before + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(listed + row * vocabulary + place, at, mask=inside)


@triton.jit
def _boundary(
    listed,
    source,
    size,
    low,
    high,
    number,
    mass,
    limit,
    peak,
    inverse,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the least key from `low` to `high` beyond which there are fewer than `limit` entries, or less share.

    `number` and `mass` are those before the list; also returned are the number and mass beyond the key.
    """
    j = tl.arange(0, PIVOTS)
    beyond, weight = number, mass  # beyond `high`
    while low < high:
        pivots = low + (high - low) * j // PIVOTS
        n, m = tl.zeros((PIVOTS,), tl.int64) + number, tl.zeros((PIVOTS,), tl.int64) + mass
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(source + tl.load(listed + at, mask=at < size, other=0), mask=at < size, other=float("-inf"))
            more = (key(x)[:, None] > pivots[None, :]) & (at < size)[:, None]
            n += tl.sum(more.to(tl.int32), 0)
            m += tl.sum(tl.where(more, _shares(x, peak, inverse)[:, None], 0), 0)
        less = (m if BY_MASS else n) < limit
        first = PIVOTS - tl.sum(less.to(tl.int32), 0)  # the first pivot beyond which there is less
        low = tl.maximum(low, tl.max(tl.where(less, low, pivots + 1), 0))
        high = tl.minimum(high, tl.min(tl.where(less, pivots, high), 0))
        beyond = tl.where(first < PIVOTS, tl.sum(tl.where(j == first, n, 0), 0), beyond)
        weight = tl.where(first < PIVOTS, tl.sum(tl.where(j == first, m, 0), 0), weight)
    return low, beyond, weight


@triton.jit
def _fitting(mass, room, most):
    """Return the least whole number, up to `most`, whose product with `mass` is at least `room`."""
    least = most * 0
    while least < most:
        middle = (least + most) >> 1
        below = middle * mass < room
        least = tl.where(below, middle + 1, least)
        most = tl.where(below, most, middle)
    return least


@triton.jit(do_not_specialize=("rows",))
def _settle(
    logits,
    copies,
    bounds,
    table,
    best,
    counts,
    masses,
    lists,
    cuts,
    stride,
    rows,
    vocabulary,
    sections,
    ADJUSTS: tl.constexpr,
    SECTIONS: tl.constexpr,
    BUCKETS: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak = peak_of(best, row, sections, SECTIONS)
    if sampled(table, rows, row, peak) & divided(table, rows, row, vocabulary):
        _, _, counted, weighed, size, total = _span(
            counts, masses, table, rows, row, vocabulary, sections, SECTIONS, BUCKETS
        )
        source = source_of(logits, copies, bounds, row, stride, vocabulary, ADJUSTS)
        listed = lists + row * vocabulary
        lowest, highest = tl.full((TILE,), 2147483647, tl.int32), tl.full((TILE,), -2147483648, tl.int32)
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(source + tl.load(listed + at, mask=at < size, other=0), mask=at < size, other=0.0)
            lowest = tl.where(at < size, tl.minimum(lowest, key(x)), lowest)
            highest = tl.where(at < size, tl.maximum(highest, key(x)), highest)
        low, high = tl.min(lowest, 0).to(tl.int64), tl.max(highest, 0).to(tl.int64)

        inverse, top_p = parameter(table, rows, row, INVERSE), parameter(table, rows, row, TOP_P)
        top_k, ties = tl.load(table + TOP_K * rows + row), size
        if (top_k > 0) & (top_k < vocabulary):
            low, more, mass = _boundary(
                listed, source, size, low, high, counted, weighed, top_k, peak, inverse, False, TILE, PIVOTS
            )
            ties = top_k - more
            total = mass + ties * _shares(_value(low), peak, inverse)
        if top_p < 1:
            lower, limit = low, _cut(top_p, total)
            low, more, mass = _boundary(
                listed, source, size, low, high, counted, weighed, limit, peak, inverse, True, TILE, PIVOTS
            )
            fitting = _fitting(_shares(_value(low), peak, inverse), limit - mass, size)
            ties = tl.where(low == lower, tl.minimum(ties, fitting), fitting)

        last, seen = vocabulary, ties * 0
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            id = tl.load(listed + at, mask=at < size, other=0)
            tied = (key(tl.load(source + id, mask=at < size, other=0.0)) == low) & (at < size)
            number = seen + tl.cumsum(tied.to(tl.int32), 0)
            last = tl.minimum(last, tl.min(tl.where(tied & (number == ties), id, vocabulary), 0))
            seen += tl.sum(tied.to(tl.int32), 0)
        tl.store(cuts + 2 * row, low)
        tl.store(cuts + 2 * row + 1, last.to(tl.int64))


def boundaries(logits: torch.Tensor, table: torch.Tensor, found: Read) -> torch.Tensor:
    """Find where top_k and top_p cut rows.

    Args:
        logits: float32 [rows, vocabulary].
        table: parameters by row, see `sampling_kernels.Asked`.
        found: the result of `read` for the rows.

    Returns:
        int64 [rows, 2]: the key of the least logit that is kept, and the last entry with this key that is. Arbitrary
        for rows that are not cut.
    """
    (rows, vocabulary), sections = logits.shape, found.best.shape[1]
    counts = torch.empty(rows, sections, BUCKETS, dtype=torch.int32, device=logits.device)
    masses = torch.empty(rows, sections, BUCKETS, dtype=torch.int64, device=logits.device)
    lists = torch.empty(rows, vocabulary, dtype=torch.int32, device=logits.device)
    cuts = torch.empty(rows, 2, dtype=torch.int64, device=logits.device)
    adjusts = found.copies is not logits
    given = logits, found.copies, found.bounds, table, found.best, counts, masses
    shape = logits.stride(0), rows, vocabulary, sections
    _weigh[(rows, sections)](*given, *shape, adjusts, SECTION, above(sections), BUCKETS, **OPTIONS)
    _list[(rows, sections)](*given, lists, *shape, adjusts, SECTION, above(sections), BUCKETS, **OPTIONS)
    _settle[(rows,)](*given, lists, cuts, *shape, adjusts, above(sections), BUCKETS, _TILE, _PIVOTS, **OPTIONS)
    return cuts
