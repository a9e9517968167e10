"""Attention over the pages of a KV cache.

Promise: the result of a row depends on its query and on the keys and values at the positions that it sees, and on
nothing else: not on the other rows of its piece, nor on how windows are cut into pieces, nor on how long others are.

Three launches, as docs/numerics.md states it: scores of all keys, a block of them a program; their exponentials and the
total of these, some heads of rows a program; values times weights, key after key, some queries a program. What a row
does not see is selected away, never added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.attention import SHARING
from detgen.kernels.triton.float_functions import capped, exponential, fold
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.operands import PAGE
from detgen.program.steps import Attend

_PAGE = tl.constexpr(PAGE)
_QUERIES = 16  # of a program, at most
_HEADS = 2  # of rows whose scores a program weighs, at most
_MOST = 1 << 28  # bytes of scores that there are at a time


@triton.jit
def _first_seen(position, window, chunk):
    """The first key that the row at a position sees; a window or a chunk of 0 bounds nothing."""
    of_window = tl.where((window > 0) & (position >= window), position - window + 1, position * 0)
    of_chunk = position // tl.maximum(chunk, 1) * chunk
    return tl.maximum(of_window, of_chunk)


@triton.jit
def _queries(pieces, piece, tile, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Of a tile of a piece: slot, rows, positions, heads in the group, which are there, first and last position."""
    slot, start = tl.load(pieces + 4 * piece), tl.load(pieces + 4 * piece + 1)
    count, first = tl.load(pieces + 4 * piece + 2), tl.load(pieces + 4 * piece + 3)
    of = tile * QUERIES + tl.arange(0, QUERIES)
    there = of < count * GROUP
    low = start + tile * QUERIES // GROUP
    high = tl.minimum(start + count, start + (tile * QUERIES + QUERIES - 1) // GROUP + 1)
    return slot, first + of // GROUP, start + of // GROUP, of % GROUP, there, low, high


@triton.jit
def _score(
    qkv,
    keys,
    pieces,
    tables,
    weights,
    scale,
    cap,
    window,
    chunk,
    blocks,
    head,
    heads,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CAPPED: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    piece, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    own, block = tl.program_id(1), tl.program_id(2)
    slot, row, position, of_group, there, low, high = _queries(pieces, piece, tile, GROUP, QUERIES)
    first = block * _PAGE
    if (low < high) & (first < high) & (first + _PAGE > _first_seen(low, window, chunk)):
        at = tl.arange(0, _PAGE)
        page = tl.load(tables + slot * blocks + block).to(tl.int64)
        key = keys + (page * KV_HEADS + head + own) * (SIZE * _PAGE) + at
        query = qkv + row * WIDE + ((head + own) * GROUP + of_group) * SIZE
        x = tl.zeros((QUERIES, _PAGE), tl.float32)
        for d in range(SIZE):
            entry = tl.load(query + d, mask=there, other=0.0)
            x = tl.fma(tl.load(key + d * _PAGE)[None, :], entry[:, None], x)
        x = x * scale
        if CAPPED:
            x = capped(x, cap)
        seen = (first + at)[None, :]
        lowest = _first_seen(position, window, chunk)
        x = tl.where((seen >= lowest[:, None]) & (seen <= position[:, None]), x, float("-inf"))
        to = weights + ((row * heads + own) * GROUP + of_group)[:, None] * (blocks * _PAGE) + seen
        tl.store(to, x, mask=there[:, None])


@triton.jit(do_not_specialize=("items",))
def _weigh(positions, weights, totals, window, chunk, span, heads, items, ITEMS: tl.constexpr):
    """Scores become weights in place; an item is a head of a row."""
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    position = tl.load(positions + item // heads, mask=item < items, other=0)
    lowest, lane = _first_seen(position, window, chunk), tl.arange(0, 16)[None, :]
    first, last = tl.min(lowest, 0) // 16 * 16, tl.max(position, 0)
    of = weights + item[:, None] * span + lane
    most = tl.full((ITEMS, 16), float("-inf"), tl.float32)
    for j in range(first, last + 1, 16):
        sees = (item < items)[:, None] & (j + lane >= lowest[:, None]) & (j + lane <= position[:, None])
        x = tl.load(of + j, mask=sees, other=float("-inf"))
        most = tl.where(x > most, x, most)
    largest = tl.max(most, 1)[:, None]
    total = tl.zeros((ITEMS, 16), tl.float32)
    for j in range(first, last + 1, 16):
        sees = (item < items)[:, None] & (j + lane >= lowest[:, None]) & (j + lane <= position[:, None])
        x = exponential(tl.load(of + j, mask=sees, other=float("-inf")) - largest)
        total += x
        tl.store(of + j, x, mask=sees)
    tl.store(totals + item, fold(total, ITEMS), mask=item < items)


@triton.jit
def _mix(
    kept,
    pieces,
    tables,
    weights,
    totals,
    to,
    window,
    chunk,
    blocks,
    head,
    heads,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    piece, tile, own = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    slot, row, position, of_group, there, low, high = _queries(pieces, piece, tile, GROUP, QUERIES)
    if low < high:
        at = tl.arange(0, WIDTH)
        lowest = _first_seen(position, window, chunk)
        of = weights + ((row * heads + own) * GROUP + of_group) * (blocks * _PAGE)
        sums = tl.zeros((QUERIES, WIDTH), tl.float32)
        first = _first_seen(low, window, chunk)
        for block in range(first // _PAGE, tl.cdiv(high, _PAGE)):
            page = tl.load(tables + slot * blocks + block).to(tl.int64)
            value = kept + (page * (KV_HEADS * _PAGE) + head + own) * VALUES + at
            before = block * _PAGE
            for j in range(tl.maximum(first, before), tl.minimum(high, before + _PAGE)):
                sees = there & (j >= lowest) & (j <= position)
                weight = tl.load(of + j, mask=sees, other=0.0)
                entry = tl.load(value + (j - before) * (KV_HEADS * VALUES), mask=at < VALUES, other=0.0)
                sums = tl.where(sees[:, None], tl.fma(entry[None, :], weight[:, None], sums), sums)
        total = tl.load(totals + (row * heads + own) * GROUP + of_group, mask=there, other=1.0)
        sums = tl.div_rn(sums, tl.zeros_like(sums) + total[:, None])
        result = row * (KV_HEADS * GROUP) + (head + own) * GROUP + of_group
        sums = tl.where(sums == 0.0, 0.0, sums)  # no -0
        tl.store(to + result[:, None] * VALUES + at[None, :], sums, mask=there[:, None] & (at < VALUES)[None, :])


def attend(
    step: Attend,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    pieces: torch.Tensor,
    tables: torch.Tensor,
    to: torch.Tensor,
) -> None:
    """`steps.Attend` of all rows of a pass.

    Args:
        step: the step.
        qkv: float32 [rows, width], what `steps.Rotate` left.
        positions: int64 [rows], of each row in its sequence; they lie in the blocks of `tables`.
        pieces: int64 [pieces, 4], as `lay_out` of kernels/attention makes them; pieces of no tokens are passed over.
        tables: int64 [slots, blocks], the page of each block of PAGE positions of a slot.
        to: float32 [rows, heads * values]; takes the results. What belongs to no piece stays as it is.
    """
    cache, (rows, wide), blocks = step.cache, qkv.shape, tables.shape[1]
    kv_heads, group, span = cache.kv_heads, cache.heads // cache.kv_heads, blocks * PAGE
    most = max(SHARING, group)  # queries of a piece that read a head's keys
    queries = tile(most, _QUERIES)
    tiles, bounds = triton.cdiv(most, queries), (step.window, step.chunk)
    each = min(max(_MOST // (4 * rows * group * span), 1), kv_heads)  # key heads at a time
    weights = torch.empty(rows, each * group, span, device=qkv.device)
    totals = torch.empty(rows, each * group, device=qkv.device)
    for head in range(0, kv_heads, each):
        some = min(each, kv_heads - head)
        of = some * group
        capped_by = float(step.softcap or 1.0)
        _score[(len(pieces) * tiles, some, blocks)](
            *(qkv, cache.keys, pieces, tables, weights, float(step.scale), capped_by, *bounds, blocks, head, some),
            *(kv_heads, group, cache.size, wide, bool(step.softcap), tiles, queries),
            **OPTIONS,
        )
        beside = tile(rows * of, _HEADS)
        _weigh[(triton.cdiv(rows * of, beside),)](
            *(positions, weights, totals, *bounds, span, of, rows * of, beside), num_warps=1, **OPTIONS
        )
        _mix[(len(pieces) * tiles, some)](
            *(cache.kept, pieces, tables, weights, totals, to, *bounds, blocks, head, some),
            *(kv_heads, group, cache.values, above(cache.values), tiles, queries),
            **OPTIONS,
        )
