"""Lays the rows of a pass out in attention tiles, for attention by torch's operators, and attends tile by tile.

A tile is a set of pieces of windows; its attention is one call. One gather brings the pages of all tiles together, one
moves the rows of all heads into the tiles, another moves the results back. Native attention needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, Attend, AttentionTraits

# Cost, in places, of one more tile and of 64 more keys of a member.
_CALL, _KEYS = 15, 2


def attention_area(rows: float, keys: float) -> float:
    """Cost of the attention of a pass, in places: `rows` rows, of windows that read `keys` keys together."""
    return _CALL + rows + _KEYS * keys / BLOCK


def group_pieces(pieces: np.ndarray) -> list[np.ndarray]:
    """The pieces of each tile, int64 [members]: small ones together, large ones together, or alone if that is cheaper.

    A tile is as wide as its widest member, reads as many keys as its longest one, and costs a call.

    Args:
        pieces: int64 [pieces, 4], as `cut_pieces` makes them.
    """
    tokens, ends = pieces[:, 2], pieces[:, 1] + pieces[:, 2]
    alone = _area(1, tokens, ends)
    order = np.argsort(alone, kind="stable")
    found = []
    while len(order):
        counts = np.arange(1, len(order) + 1)
        width, keys = np.maximum.accumulate(tokens[order]), np.maximum.accumulate(ends[order])
        cost = _area(counts, width, keys) - np.cumsum(alone[order])  # and what the others cost alone
        best = int(np.argmin(cost)) + 1
        found.append(order[:best])
        order = order[best:]
    return found


def _area(members: np.ndarray | int, width: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Cost of a tile, in places: `members` pieces of `width` tokens that read `keys` keys."""
    return _CALL + members * (width + _KEYS * keys / BLOCK)


@dataclass(slots=True)
class Tile:
    """Pieces with up to `width` tokens each, reading `length` keys.

    Attributes:
        query_rows: padded query rows per KV head: `width` tokens of each query head of its group, then padding, which
            repeats the last of them.
        rows: int64 [members, width], the row of the pass at each place; 0 if a piece has fewer tokens.
        positions: int64 [members, width], likewise its position.
        masks: masks made so far in this pass, by window, chunk and group.
    """

    width: int
    query_rows: int
    length: int
    rows: np.ndarray
    positions: np.ndarray
    masks: dict[tuple[int | None, int | None, int], torch.Tensor] = field(default_factory=dict)

    def lay(self, places: np.ndarray) -> np.ndarray:
        """[..., group, width] as [..., query_rows]."""
        flat = places.reshape(*places.shape[:-2], -1)
        return flat[..., np.minimum(np.arange(self.query_rows), flat.shape[-1] - 1)]

    def mask(self, traits: AttentionTraits, group: int, like: torch.Tensor) -> torch.Tensor:
        """[members, 1, query_rows, length]: 0 where visible, -inf elsewhere; made once per pass, window and chunk.

        Has the dtype and device of `like`.
        """
        window, key = traits.window, (traits.window, traits.chunk, group)
        found = self.masks.get(key)
        if found is None:
            reach = self.length if window is None else min(window, self.length)
            rows = self.lay(np.repeat(self.length + reach - 1 - self.positions[:, None], group, axis=1))
            at = torch.from_numpy(rows.reshape(-1)).to(like.device)
            band = _band(self.length, reach, like.dtype, like.device)
            found = band.index_select(0, at).view(len(rows), 1, self.query_rows, self.length)
            if traits.chunk is not None:
                firsts = self.lay(np.repeat(self.positions[:, None] // traits.chunk * traits.chunk, group, axis=1))
                at = torch.from_numpy(firsts).to(like.device)[:, None, :, None]
                found = found.masked_fill(torch.arange(self.length, device=like.device) < at, -torch.inf)
            self.masks[key] = found
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
        pieces: int64 [pieces, 4], as `cut_pieces` makes them.
        tables: int64 [slots, blocks], the page of each block of a slot.
        scratch: the page for keys that a tile reads but that no row of a member sees.
        rows: rows of the pass, padding included.
        group: query heads per KV head.
        pad_query_rows: the least allowed number of query rows that holds a given number.
        fit_keys: the least allowed key length that holds a given number of keys.
        device: of the tensors.

    Attributes:
        tiles: the tiles.
    """

    def __init__(
        self,
        pieces: np.ndarray,
        tables: np.ndarray,
        scratch: int,
        rows: int,
        group: int,
        pad_query_rows: Callable[[int], int],
        fit_keys: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self.tiles: list[Tile] = []
        self._device = device
        self._gathers: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Of each row: where its first head's result is, counted over all tiles, and its tile's width; padding at 0.
        self._where = np.zeros((2, rows), dtype=np.int64)
        pages = []
        above = 0
        for members in group_pieces(pieces):
            slots, starts, tokens, firsts = pieces[members].T[:, :, None]
            along = np.arange(int(tokens.max()))
            width, length = len(along), fit_keys(int((starts + tokens).max()))
            query_rows = pad_query_rows(group * width)
            real = along < tokens
            taken, seen = np.where(real, firsts + along, 0), np.where(real, starts + along, 0)
            place = above + query_rows * np.arange(len(members))[:, None] + along
            self._where[:, taken[real]] = place[real], np.full(int(tokens.sum()), width)
            self.tiles.append(Tile(width, query_rows, length, taken, seen))
            blocks = np.arange(length // BLOCK)
            held = tables[slots, np.minimum(blocks, tables.shape[1] - 1)]
            pages.append(np.where(blocks * BLOCK < starts + tokens, held, scratch).reshape(-1))
            above += len(members) * query_rows
        self._pages = torch.from_numpy(np.concatenate(pages)).to(device)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        implementation: Attend,
        traits: AttentionTraits,
    ) -> torch.Tensor:
        """Attention of all rows.

        Args:
            q: [rows, heads, head_size]; may be a slice of a tensor with more heads per row.
            keys: the layer's keys, [positions, kv_heads, head_size].
            values: its values, [positions, kv_heads, value head_size].
            implementation: computes the attention of a tile.
            traits: the layer's attention traits.

        Returns:
            [rows, heads, value head_size].
        """
        rows, heads, size = q.shape
        kv_heads = keys.shape[1]
        flat, stride = _flat(q)
        take, back = self._gather(stride, heads, kv_heads)
        taken = flat.index_select(0, take)
        read = [x.view(-1, BLOCK, *x.shape[1:]).index_select(0, self._pages).flatten(0, 1) for x in (keys, values)]
        outs = []
        at = behind = 0
        for tile in self.tiles:
            members = len(tile.rows)
            count, held = members * tile.query_rows * kv_heads, members * tile.length
            part = taken[at : at + count].view(members, kv_heads, -1, size)
            k, v = (x[behind : behind + held].unflatten(0, (members, -1)) for x in read)
            mask = tile.mask(traits, heads // kv_heads, q)
            out = implementation(part, k, v, mask, traits)
            outs.append(out.transpose(1, 2).reshape(count, -1))  # a view, as torch's fused kernel lays it out
            at += count
            behind += held
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, back).view(rows, heads, -1)

    def _gather(self, stride: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tiles' queries among heads of rows `stride` apart, and of each row's results.

        Queries of a tile are ordered as [members, kv_heads, query_rows], results as [members, query_rows, kv_heads],
        query rows as [group, width]. Both int64, made once per pass.
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
