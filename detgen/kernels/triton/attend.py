"""Attention over the pages of a KV cache.

Promise: the result of a row depends only on its query and on the keys and values at the positions that it sees: not on
the other rows of its piece, nor on how windows are cut into pieces, nor on the length of others.

Two launches, as docs/numerics.md defines: a program reads sections of the keys of some queries, each by itself, block
after block; another joins the sections of some queries, in order. Keys that a row does not see are masked out, never
added. Joining a result over no keys changes nothing, so a program reads all blocks that any of its queries sees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.attention import SHARING
from detgen.kernels.triton.float_functions import capped, exponential, fold
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.operands import PAGE, SECTION_BLOCKS
from detgen.program.steps import Attend

_PAGE = tl.constexpr(PAGE)
_BLOCKS = tl.constexpr(SECTION_BLOCKS)
_QUERIES = 8  # of a program, at most: more would need more registers than there are
_MOST = 1 << 28  # most bytes of the results of sections at once
_PROGRAMS = 2048  # are enough to keep a device busy
_LEAST_SPREAD = 4  # programs that share the sections of some queries: few contexts may be much longer than the others


@triton.jit
def _first_seen(position, window, chunk):
    """Return the first key that the row at a position sees; a window or a chunk of 0 bounds nothing."""
    of_window = tl.where((window > 0) & (position >= window), position - window + 1, position * 0)
    of_chunk = position // tl.maximum(chunk, 1) * chunk
    return tl.maximum(of_window, of_chunk)


@triton.jit
def _queries(pieces, piece, tile, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Return, of a tile of a piece: slot, rows, positions, heads in the group, which exist, first and last position."""
    slot, start = tl.load(pieces + 4 * piece), tl.load(pieces + 4 * piece + 1)
    count, first = tl.load(pieces + 4 * piece + 2), tl.load(pieces + 4 * piece + 3)
    of = tile * QUERIES + tl.arange(0, QUERIES)
    there = of < count * GROUP
    low = start + tile * QUERIES // GROUP
    high = tl.minimum(start + count, start + (tile * QUERIES + QUERIES - 1) // GROUP + 1)
    return slot, first + of // GROUP, start + of // GROUP, of % GROUP, there, low, high


@triton.jit
def _joined(most, total, results, behind_most, behind_total, behind_results):
    """Join the results for queries over some keys with those over later keys.

    A result is the largest score and the total of the weights, [QUERIES], and the weighted values, [QUERIES, WIDTH].
    """
    largest = tl.where(behind_most > most, behind_most, most)
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    a, b = exponential(most - shift), exponential(behind_most - shift)
    results = tl.fma(behind_results, b[:, None], results * a[:, None])
    return largest, tl.fma(behind_total, b, total * a), results


@triton.jit
def _read(
    qkv,
    keys,
    kept,
    pieces,
    tables,
    tops,
    totals,
    results,
    slopes,
    scale,
    cap,
    window,
    chunk,
    blocks,
    of_slot,
    of_block,
    head,
    heads,
    KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    IN_KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPES: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    # Heads are those of a part of the queries that share a key head.
    piece, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    own = tl.program_id(1)
    slot, row, position, of_group, there, low, high = _queries(pieces, piece, tile, GROUP, QUERIES)
    first = _first_seen(low, window, chunk)
    if low < high:
        key, value, lane = tl.arange(0, _PAGE), tl.arange(0, WIDTH), tl.arange(0, 16)
        lowest, kept_head = _first_seen(position, window, chunk), (head + own) // PARTS
        query = qkv + row * WIDE + ((head + own) * GROUP + of_group) * SIZE
        sections = tl.cdiv(high, _PAGE * _BLOCKS)
        for section in range(first // (_PAGE * _BLOCKS) + tl.program_id(2), sections, tl.num_programs(2)):
            begin = tl.maximum(first // _PAGE, section * _BLOCKS)
            end = tl.minimum(tl.cdiv(high, _PAGE), section * _BLOCKS + _BLOCKS)
            state = ((row * heads + own) * GROUP + of_group) * tl.cdiv(blocks, _BLOCKS) + section
            of = results + state * STRIDE  # holds the weights of a block before it takes the results
            most = tl.full((QUERIES,), float("-inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            sums = tl.zeros((QUERIES, WIDTH), tl.float32)
            for block in range(begin, end):
                page, before = tl.load(tables + slot * of_slot + block * of_block).to(tl.int64), block * _PAGE
                of_key = keys + (page * KV_HEADS + kept_head) * (SIZE * _PAGE) + key
                x = tl.zeros((QUERIES, _PAGE), tl.float32)
                for d in range(SIZE):
                    entry = tl.load(query + d, mask=there, other=0.0)
                    x = tl.fma(tl.load(of_key + d * _PAGE).to(tl.float32)[None, :], entry[:, None], x)
                x = x * scale
                if CAPPED:
                    x = capped(x, cap)
                seen = (key + before)[None, :]
                if SLOPES:
                    slope = tl.load(slopes + (head + own) * GROUP + of_group, mask=there, other=0.0)
                    x = tl.fma(tl.zeros_like(x) + slope[:, None], (seen - position[:, None]).to(tl.float32), x)
                x = tl.where((seen >= lowest[:, None]) & (seen <= position[:, None]), x, float("-inf"))
                top = tl.max(tl.where(x == x, x, float("-inf")), 1)
                weights = exponential(x - tl.where(top > float("-inf"), top, 0.0)[:, None])
                tl.debug_barrier()  # the weights of the previous block have been read
                tl.store(of[:, None] + key[None, :], weights, mask=there[:, None])
                tl.debug_barrier()
                lanes = tl.zeros((QUERIES, 16), tl.float32)
                for at in tl.static_range(0, _PAGE, 16):
                    lanes += tl.load(of[:, None] + (lane + at)[None, :], mask=there[:, None], other=0.0)
                if IN_KEYS:
                    of_value = keys + ((page * KV_HEADS + kept_head) * SIZE + SIZE - VALUES + value) * _PAGE
                else:
                    of_value = kept + (page * KV_HEADS + kept_head) * (_PAGE * VALUES) + value
                mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
                for j in range(tl.maximum(first, before), tl.minimum(high, before + _PAGE)):
                    sees = there & (j >= lowest) & (j <= position)
                    weight = tl.load(of + (j - before), mask=sees, other=0.0)
                    read = of_value + (j - before) * (1 if IN_KEYS else VALUES)
                    entry = tl.load(read, mask=value < VALUES, other=0.0).to(tl.float32)
                    mixed = tl.where(sees[:, None], tl.fma(entry[None, :], weight[:, None], mixed), mixed)
                most, total, sums = _joined(most, total, sums, top, fold(lanes, QUERIES), mixed)
            tl.debug_barrier()
            tl.store(tops + state, most, mask=there)
            tl.store(totals + state, total, mask=there)
            tl.store(of[:, None] + value[None, :], sums, mask=there[:, None] & (value < VALUES)[None, :])


@triton.jit
def _join(
    pieces,
    tops,
    totals,
    results,
    sinks,
    to,
    window,
    chunk,
    blocks,
    head,
    heads,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    piece, tile, own = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    _, row, _, of_group, there, low, high = _queries(pieces, piece, tile, GROUP, QUERIES)
    if low < high:
        value = tl.arange(0, WIDTH)
        inside = there[:, None] & (value < VALUES)[None, :]
        of = ((row * heads + own) * GROUP + of_group) * tl.cdiv(blocks, _BLOCKS)
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES, WIDTH), tl.float32)
        for section in range(_first_seen(low, window, chunk) // (_BLOCKS * _PAGE), tl.cdiv(high, _BLOCKS * _PAGE)):
            state = of + section
            top = tl.load(tops + state, mask=there, other=0.0)
            behind = tl.load(totals + state, mask=there, other=1.0)
            x = tl.load(results + state[:, None] * STRIDE + value[None, :], mask=inside, other=0.0)
            most, total, sums = _joined(most, total, sums, top, behind, x)
        if SINKS:
            sink = tl.load(sinks + (head + own) * GROUP + of_group, mask=there, other=0.0)
            one = tl.full((QUERIES,), 1.0, tl.float32)
            most, total, sums = _joined(most, total, sums, sink, one, tl.zeros((QUERIES, WIDTH), tl.float32))
        sums = tl.div_rn(sums, tl.zeros_like(sums) + total[:, None])
        sums = tl.where(sums == 0.0, 0.0, sums)  # no -0
        result = row * HEADS + (head + own) * GROUP + of_group
        tl.store(to + result[:, None] * VALUES + value[None, :], sums, mask=inside)


def attend(step: Attend, qkv: torch.Tensor, pieces: torch.Tensor, tables: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Attend` for all rows of a pass.

    Args:
        step: the step.
        qkv: float32 [rows, width], as left by `steps.Rotate`.
        pieces: int64 [pieces, 4], as from `lay_out` of kernels/attention, with one token each if there are as many as
            rows; pieces without tokens are skipped.
        tables: int64 [slots, blocks], the page of each block of PAGE positions of a slot.
        to: float32 [rows, heads * values]; takes the results. Rows of no piece are left unchanged.
    """
    cache, (rows, wide), blocks = step.cache, qkv.shape, tables.shape[1]
    group, sections = cache.heads // cache.kv_heads, triton.cdiv(blocks, SECTION_BLOCKS)
    stride = max(cache.values, PAGE)
    room = max(_MOST // (4 * rows * sections * stride), 1)  # for the results of so many query heads at a time
    parts = next(n for n in range(1, group + 1) if group % n == 0 and (group // n <= room or n == group))
    # Queries of a piece that read a head's keys.
    most = triton.cdiv(group if len(pieces) == rows else max(SHARING, group), parts)
    group, heads = group // parts, cache.kv_heads * parts
    queries = tile(most, _QUERIES)
    tiles, each = triton.cdiv(most, queries), min(max(room // group, 1), heads)
    known = [torch.empty(rows, each * group, sections, device=qkv.device) for _ in range(2)]
    known.append(torch.empty(rows, each * group, sections, stride, device=qkv.device))
    shape = above(cache.values), stride, tiles, queries
    kept, sinks, slopes = (qkv if x is None else x for x in (cache.kept, step.sinks, step.slopes))
    for head in range(0, heads, each):
        some = min(each, heads - head)
        spread = min(max(triton.cdiv(_PROGRAMS, len(pieces) * tiles * some), _LEAST_SPREAD), sections)
        seen = step.window, step.chunk, blocks
        _read[(len(pieces) * tiles, some, spread)](
            *(qkv, cache.keys, kept, pieces, tables, *known, slopes),
            *(float(step.scale), float(step.softcap or 1.0), *seen, *tables.stride(), head, some),
            *(cache.kv_heads, parts, group, cache.size, cache.values, cache.kept is None, wide),
            *(bool(step.softcap), step.slopes is not None, *shape),
            **OPTIONS,
        )
        _join[(len(pieces) * tiles, some)](
            *(pieces, *known, sinks, to, *seen, head, some),
            *(cache.heads, group, cache.values, step.sinks is not None, *shape),
            **OPTIONS,
        )
