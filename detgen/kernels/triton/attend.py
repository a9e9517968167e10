"""Attention of packed rows over pages.

Promise: the result of a row depends on its query and on the keys and values at the positions that it may see, and on
nothing else: not on the other rows of its tile, nor on where a window is cut into tiles, nor on how long others are.

A program takes a tile of query rows, which are the heads of a group times the tokens of a piece of a window, always as
many rows, and the keys of one split: SPLIT positions, at multiples of SPLIT. It reads them in whole blocks of BLOCK, at
multiples of BLOCK, one after the other, with the running maximum of "online" softmax (Milakov and Gimelshein,
arXiv 1805.02867; in tiles: Dao et al., arXiv 2205.14135). A block that a row must not see leaves it as it is: its
maximum stays, so that what it has is multiplied by exp(0), and what is added is 0, as the cache holds finite numbers
only. Another launch adds the splits of each row, the first one first. Splits are of a fixed size, as a fixed number of
them would make the order of a row's sums depend on the longest row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.attention import BLOCK, AttentionTraits, attend_blocks
from detgen.kernels.triton.launching import INTERPRETED, OPTIONS, above, product

SPLIT = 1024  # positions
_EVERYTHING = 1 << 30  # the window of a layer that sees all positions, and its chunk


def tile_rows(group: int) -> int:
    """Query rows of a tile, for `group` query heads per KV head: what a tensor core takes at a time, if they fit."""
    return above(group)


def most_tokens(group: int) -> int:
    """The most tokens of a piece: those whose heads of a group fill a tile."""
    return tile_rows(group) // group


@triton.jit
def _weighed(top, scores):
    """The new maximum, the factor of what was added up before, and the weights of the new scores."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # as long as a row has seen nothing
    return higher, tl.exp(top - base), tl.exp(scores - base[:, None])


@triton.jit
def _split(
    queries,
    keys,
    values,
    pieces,
    tables,
    sums,
    tops,
    totals,
    scale,
    softcap,
    window,
    chunk,
    rows,
    blocks,
    kv_heads,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    piece, head, split = pieces + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, count, first = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    low = tl.maximum(tl.maximum(start - window + 1, start // chunk * chunk), split * SPLIT)
    high = tl.minimum(start + count, (split + 1) * SPLIT)
    if low < high:
        of = tl.arange(0, TILE)
        there = of // GROUP < count
        position = start + of // GROUP
        at = (first + of // GROUP) * kv_heads * GROUP + head * GROUP + of % GROUP
        i, j, d = tl.arange(0, KEY_WIDTH), tl.arange(0, BLOCK), tl.arange(0, VALUE_WIDTH)
        q = tl.load(queries + at[:, None] * SIZE + i[None, :], mask=there[:, None] & (i < SIZE)[None, :], other=0.0)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        added = tl.zeros((TILE, VALUE_WIDTH), tl.float32)
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            place = tl.load(tables + slot * blocks + block) * BLOCK + j
            k = tl.load(
                keys + (place[None, :] * kv_heads + head) * SIZE + i[:, None], mask=(i < SIZE)[:, None], other=0.0
            )
            v = tl.load(
                values + (place[:, None] * kv_heads + head) * VALUE + d[None, :], mask=(d < VALUE)[None, :], other=0.0
            )
            scores = product(q, k, tl.zeros((TILE, BLOCK), tl.float32), INTERPRETED) * scale
            if CAPPED:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            seen = block * BLOCK + j
            lowest = tl.maximum(position - window + 1, position // chunk * chunk)
            visible = (seen[None, :] <= position[:, None]) & (seen[None, :] >= lowest[:, None])
            top, kept, weights = _weighed(top, tl.where(visible, scores, float("-inf")))
            total = total * kept + tl.sum(weights, 1)
            added = product(weights.to(v.dtype), v, added * kept[:, None], INTERPRETED)
        to = tl.cast(split, tl.int64) * rows * kv_heads * GROUP + at
        tl.store(tops + to, top, mask=there)
        tl.store(totals + to, total, mask=there)
        tl.store(sums + to[:, None] * VALUE + d[None, :], added, mask=there[:, None] & (d < VALUE)[None, :])


@triton.jit
def _add(
    sums,
    tops,
    totals,
    positions,
    out,
    window,
    chunk,
    rows,
    heads,
    VALUE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    d = tl.arange(0, VALUE_WIDTH)
    top, total = float("-inf"), 0.0
    added = tl.zeros((VALUE_WIDTH,), tl.float32)
    for split in range(tl.maximum(position - window + 1, position // chunk * chunk) // SPLIT, position // SPLIT + 1):
        at = (tl.cast(split, tl.int64) * rows + row) * heads + head
        one = tl.load(tops + at)
        higher = tl.maximum(top, one)
        kept, factor = tl.exp(top - higher), tl.exp(one - higher)
        total = total * kept + tl.load(totals + at) * factor
        added = added * kept + tl.load(sums + at * VALUE + d, mask=d < VALUE, other=0.0) * factor
        top = higher
    tl.store(out + (row.to(tl.int64) * heads + head) * VALUE + d, added / total, mask=d < VALUE)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    pieces: torch.Tensor,
    tables: torch.Tensor,
    longest: int,
    traits: AttentionTraits,
) -> torch.Tensor:
    """Attention of all rows of a pass in one layer.

    Args:
        queries: [rows, heads, size], contiguous.
        keys: the layer's keys in the cache, [positions, kv_heads, size].
        values: its values, [positions, kv_heads, value size].
        positions: int64 [rows], of each row in its sequence.
        pieces: int64 [pieces, 4] as `cut_pieces` makes them, of at most `most_tokens(group)` tokens.
        tables: int64 [slots, blocks], the page of each block of BLOCK positions of a slot.
        longest: positions of the longest sequence of the pass, or more.
        traits: the layer's attention traits.

    Returns:
        [rows, heads, value size], in the type of the queries; of rows that no piece has, anything.
    """
    (rows, heads, size), (kv_heads, value) = queries.shape, values.shape[1:]
    group, splits = heads // kv_heads, triton.cdiv(longest, SPLIT)
    sums = torch.empty(splits, rows, heads, value, device=queries.device)
    tops, totals = torch.empty(2, splits, rows, heads, device=queries.device)
    out = queries.new_empty(rows, heads, value)
    window, chunk, width = traits.window or _EVERYTHING, traits.chunk or _EVERYTHING, above(value)
    _split[(len(pieces), kv_heads, splits)](
        *(queries, keys, values, pieces, tables, sums, tops, totals),
        *(traits.scale, traits.softcap or 1.0, window, chunk, rows, tables.shape[1], kv_heads),
        *(group, tile_rows(group), size, value, above(size), width, BLOCK, SPLIT),
        *(traits.softcap is not None, INTERPRETED),
        **OPTIONS,
    )
    _add[(rows, heads)](sums, tops, totals, positions, out, window, chunk, rows, heads, value, width, SPLIT, **OPTIONS)
    return out


def attend_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    pieces: torch.Tensor,
    tables: torch.Tensor,
    longest: int,
    traits: AttentionTraits,
) -> torch.Tensor:
    """The same by PyTorch's operators; arguments as `attend`. Looks at no number of any tensor."""
    device, (rows, heads, _), kv_heads = queries.device, queries.shape, keys.shape[1]
    group = heads // kv_heads
    slots, starts, counts, firsts = pieces.T[..., None]
    token = torch.arange(most_tokens(group), device=device)
    row, position = (firsts + token).clamp_max(rows - 1), starts + token
    blocks = tables[slots, : -(-longest // BLOCK)].mT
    places = (blocks * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    seen = torch.arange(places.shape[1], device=device)
    window, chunk, position = traits.window or _EVERYTHING, traits.chunk or _EVERYTHING, position[..., None]
    visible = (seen <= position) & (seen > position - window) & (seen >= position // chunk * chunk)
    mask = torch.zeros(visible.shape, dtype=queries.dtype, device=device).masked_fill(~visible, -torch.inf)
    q = queries[row].unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)
    tiles = attend_blocks(q, keys[places], values[places], mask.repeat_interleave(group, 1)[:, None], traits)
    found = tiles.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
    out = queries.new_zeros(rows + 1, heads, found.shape[-1])
    out[torch.where(token < counts, row, rows)] = found  # the last row takes what belongs to nobody
    return out[:rows]
