"""Lays the rows of a pass out in attention tiles, and attends tile by tile.

A tile is a range of slots with equally many tokens each; its attention is one call over views of the cache. One gather
moves the rows of all heads into the tiles, another moves the results back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from detgen.kernels.attention import Attend, AttentionTraits

# Cost, in places, of one more tile and of 64 more keys of a slot.
_CALL, _KEYS = 15, 2

# Views [slots, length, kv_heads, head_size] of a layer's keys and values: read(first slot, last slot + 1, length).
Read = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]


def tile_area(slots: int, width: int, keys: int) -> int:
    """Cost of a tile, in places: `slots` slots of `width` tokens that read `keys` keys."""
    return _CALL + slots * (width + _KEYS * keys // 64)


class Piece(NamedTuple):
    """Tokens of one window that share a tile: its `part`-th full piece, counted from 0, or its last one, part -1."""

    tokens: int
    slot: int
    start: int
    row: int
    part: int


@dataclass(slots=True)
class Tile:
    """Slots first..last-1 with `width` tokens each, reading `length` keys.

    Attributes:
        query_rows: padded query rows per KV head: `width` tokens of each query head of its group, then padding, which
            repeats the last of them.
        rows: int64 [slots, width], the row of the pass at each place; 0 if a slot has fewer tokens.
        positions: int64 [slots, width], likewise its position.
        masks: masks made so far in this pass.
    """

    first: int
    last: int
    width: int
    query_rows: int
    length: int
    rows: np.ndarray
    positions: np.ndarray
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def lay(self, places: np.ndarray) -> np.ndarray:
        """[..., group, width] as [..., query_rows]."""
        flat = places.reshape(*places.shape[:-2], -1)
        return flat[..., np.minimum(np.arange(self.query_rows), flat.shape[-1] - 1)]

    def mask(self, window: int | None, group: int, like: torch.Tensor) -> torch.Tensor:
        """[slots, 1, query_rows, length]: 0 where visible, -inf elsewhere; made once per pass and window size.

        Has the dtype and device of `like`.
        """
        found = self.masks.get((window, group))
        if found is None:
            reach = self.length if window is None else min(window, self.length)
            rows = self.lay(np.repeat(self.length + reach - 1 - self.positions[:, None], group, axis=1))
            at = torch.from_numpy(rows.reshape(-1)).to(like.device)
            band = _band(self.length, reach, like.dtype, like.device)
            found = band.index_select(0, at).view(len(rows), 1, self.query_rows, self.length)
            self.masks[window, group] = found
        return found


@functools.lru_cache(maxsize=64)
def _band(length: int, reach: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Masks [length + reach, length] of all positions: row length + reach - 1 - p sees keys p - reach + 1 to p.

    All rows are views of one line: -inf, zeros in the middle, -inf.
    """
    line = torch.full((2 * length + reach,), -torch.inf, dtype=dtype, device=device)
    line[length : length + reach] = 0
    return line.as_strided((length + reach, length), (1, 1))


class Tiles:
    """The tiles of a pass.

    Args:
        pieces: the pieces of each tile; no slot twice in one tile.
        rows: rows of the pass, padding included.
        group: query heads per KV head.
        pad_query_rows: the least allowed number of query rows that holds a given number.
        fit_keys: the least allowed key length that holds a given number of keys.
        device: of the tensors.

    Attributes:
        tiles: the tiles.
        area: their cost, in places; see `tile_area`.
    """

    def __init__(
        self,
        pieces: list[list[Piece]],
        rows: int,
        group: int,
        pad_query_rows: Callable[[int], int],
        fit_keys: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self.tiles: list[Tile] = []
        self.area = 0
        self._device = device
        self._gathers: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Of each piece: first row, tokens, first position, first place and first query row (per KV head) counted over
        # all tiles, width of its tile.
        table: list[tuple[int, int, int, int, int, int]] = []
        spans: list[tuple[int, int, int, int, int]] = []
        before = above = 0
        for members in pieces:
            first, last = min(p.slot for p in members), max(p.slot for p in members) + 1
            width = max(p.tokens for p in members)
            query_rows = pad_query_rows(group * width)
            length = fit_keys(max(p.start + p.tokens for p in members))
            for p in members:
                i = p.slot - first
                table.append((p.row, p.tokens, p.start, before + i * width, above + i * query_rows, width))
            spans.append((first, last, width, query_rows, length))
            before += (last - first) * width
            above += (last - first) * query_rows
            self.area += tile_area(last - first, -(-query_rows // group), length)
        row, tokens, start, at, query_row_at, width_of = np.array(sorted(table), dtype=np.int64).T
        count = int(tokens.sum())
        along = np.arange(count)
        # Of each row: where its first head's result is, counted over all tiles, and its tile's width; padding at 0.
        self._where = np.zeros((2, rows), dtype=np.int64)
        self._where[:, :count] = along + np.repeat(query_row_at - row, tokens), np.repeat(width_of, tokens)
        places = along + np.repeat(at - row, tokens)
        both = np.zeros((2, before), dtype=np.int64)
        both[:, places] = along, along + np.repeat(start - row, tokens)
        before = 0
        for first, last, width, query_rows, length in spans:
            end = before + (last - first) * width
            taken, seen = both[:, before:end].reshape(2, last - first, width)
            self.tiles.append(Tile(first, last, width, query_rows, length, taken, seen))
            before = end

    def attend(
        self,
        q: torch.Tensor,
        kv_heads: int,
        read: Read,
        implementation: Attend,
        traits: AttentionTraits,
    ) -> torch.Tensor:
        """Attention of all rows.

        Args:
            q: [rows, heads, head_size]; may be a slice of a tensor with more heads per row.
            kv_heads: heads of the cache.
            read: reads the layer's cache.
            implementation: computes the attention of a tile.
            traits: the layer's attention traits.

        Returns:
            [rows, heads, value head_size].
        """
        rows, heads, size = q.shape
        flat, stride = _flat(q)
        take, back = self._gather(stride, heads, kv_heads)
        taken = flat.index_select(0, take)
        outs = []
        at = 0
        for tile in self.tiles:
            slots = tile.last - tile.first
            count = slots * tile.query_rows * kv_heads
            part = taken[at : at + count].view(slots, kv_heads, -1, size)
            keys, values = read(tile.first, tile.last, tile.length)
            mask = tile.mask(traits.window, heads // kv_heads, q)
            out = implementation(part, keys, values, mask, traits)
            outs.append(out.transpose(1, 2).reshape(count, -1))  # a view, as torch's fused kernel lays it out
            at += count
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, back).view(rows, heads, -1)

    def _gather(self, stride: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tiles' queries among heads of rows `stride` apart, and of each row's results.

        Queries of a tile are ordered as [slots, kv_heads, query_rows], results as [slots, query_rows, kv_heads], query
        rows as [group, width]. Both int64, made once per pass.
        """
        found = self._gathers.get((stride, heads, kv_heads))
        if found is None:
            group = heads // kv_heads
            head = np.arange(heads)
            own = head.reshape(kv_heads, group, 1)
            take = [tile.lay((tile.rows * stride)[:, None, None] + own).reshape(-1) for tile in self.tiles]
            firsts, widths = self._where[:, :, None]
            back = (firsts + widths * (head % group)) * kv_heads + head // group
            found = (
                torch.from_numpy(np.concatenate(take)).to(self._device),
                torch.from_numpy(back.reshape(-1)).to(self._device),
            )
            self._gathers[stride, heads, kv_heads] = found
        return found


def _flat(q: torch.Tensor) -> tuple[torch.Tensor, int]:
    """q, [rows, heads, head_size], as [places, head_size], and the distance of its rows in places."""
    rows, heads, size = q.shape
    row, head, one = q.stride()
    if one != 1 or head != size or row % size:
        return q.reshape(rows * heads, size), heads
    stride = row // size
    return q.as_strided(((rows - 1) * stride + heads, size), (size, 1)), stride


def pieces(spans: list[tuple[int, int, int]], most: int) -> list[Piece]:
    """Windows cut into pieces of at most `most` tokens.

    Args:
        spans: slot, start and number of tokens of each window, in the order of the rows.
        most: most tokens of a piece.
    """
    found = []
    row = 0
    for slot, start, tokens in spans:
        for at in range(0, tokens, most):
            n = min(most, tokens - at)
            found.append(Piece(n, slot, start + at, row + at, -1 if at + n == tokens else at // most))
        row += tokens
    return found


def group_pieces(found: list[Piece]) -> list[list[Piece]]:
    """The pieces of each tile; pieces share one only if they are the same part of their windows."""
    parts: dict[int, list[Piece]] = {}
    for p in found:
        parts.setdefault(p.part, []).append(p)
    return [group for members in parts.values() for group in _share(members)]


def _share(pieces: list[Piece]) -> list[list[Piece]]:
    """Group pieces of different slots: short ones together, long ones together, or each alone if that is cheaper.

    A shared tile is as wide as its longest piece, over all slots that it spans; a tile of one piece costs a call.
    """
    order = sorted(pieces)
    keys = max(p.start + p.tokens for p in order)
    alone = best = sum(tile_area(1, p.tokens, p.start + p.tokens) for p in order)
    first, last, shared = order[0].slot, -1, 0
    for count, p in enumerate(order, 1):
        first, last = min(first, p.slot), max(last, p.slot)
        alone -= tile_area(1, p.tokens, p.start + p.tokens)
        cost = tile_area(last + 1 - first, p.tokens, keys) + alone
        if cost < best:
            best, shared = cost, count
    if not shared:
        return [[p] for p in order]
    return [order[:shared], *(_share(order[shared:]) if shared < len(order) else [])]
