"""How the rows of a pass are packed: windows of tokens in, tensors of rows and attention tiles out.

Everything that goes through a pass is a row: one token at one position of one slot. Consecutive rows of a slot make a
window; windows are laid out for attention in tiles. No model is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, MOST_TILE_ROWS, PERIOD, Attend, attend_fused

_CALL = 24  # what one more tile costs, in tokens of attention


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one slot that go through a pass.

    Attributes:
        slot: whose.
        start: position of the first token in its sequence.
        tokens: the token ids.
        logits: how many of the last rows' logits are wanted.
    """

    slot: int
    start: int
    tokens: list[int]
    logits: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a pass is held to.

    Attributes:
        rows: row counts a pass may have, ascending; every count between the first and the last one if `dense`.
        dense: see rows.
        tile_rows: the rows of an attention tile (query heads a group x tokens) are a multiple of this.
        key_lengths: remainders, in (BLOCK, ..., PERIOD), of the key lengths a tile may read.
        attend: the attention implementation.
    """

    rows: tuple[int, ...]
    dense: bool
    tile_rows: int
    key_lengths: tuple[int, ...]
    attend: Attend

    def fit_rows(self, rows: int) -> int:
        """The least allowed row count that holds `rows`."""
        if self.dense:
            return max(rows, self.rows[0])
        return next(n for n in self.rows if n >= rows)

    def fit_width(self, tokens: int, group: int) -> int:
        """The least tokens a slot that hold `tokens` and make whole tiles of `group` query heads."""
        step = self.tile_rows // gcd(group, self.tile_rows)
        return -(-tokens // step) * step

    def most_width(self, group: int) -> int:
        """The most tokens a slot that a tile of `group` query heads may have."""
        return max(MOST_TILE_ROWS // group // self.fit_width(1, group), 1) * self.fit_width(1, group)

    def fit_keys(self, keys: int) -> int:
        """The least allowed key length that holds `keys`."""
        whole, rest = divmod(keys, PERIOD)
        return whole * PERIOD + (next(n for n in self.key_lengths if n >= rest) if rest else 0)

    @property
    def most_rows(self) -> int:
        """The largest allowed row count."""
        return self.rows[-1]


FREE_SHAPES = Shapes(
    rows=(1, 512), dense=True, tile_rows=1, key_lengths=tuple(range(BLOCK, PERIOD + 1, BLOCK)), attend=attend_fused
)


@dataclass(slots=True)
class Tile:
    """Slots first..last-1 with `width` tokens each, reading `length` keys."""

    first: int
    last: int
    width: int
    length: int
    positions: torch.Tensor  # int64 [slots, width], 0 where a slot has fewer tokens
    gather: torch.Tensor | None  # int64 [slots * width] rows of the pass; None: all rows in order
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[slots, 1, group * width, length]: 0 where visible, -inf elsewhere; made once a pass and window size."""
        found = self.masks.get(window)
        if found is None:
            keys = torch.arange(self.length, device=self.positions.device)
            at = self.positions[..., None]
            hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            found = mask.repeat(1, group, 1).unsqueeze(1) if group > 1 else mask.unsqueeze(1)
            self.masks[window] = found
        return found


@dataclass(slots=True)
class Packed:
    """A packed pass.

    Attributes:
        ids: int64 [1, rows], padding included.
        positions: int64 [1, rows].
        arena: int64 [rows], where each row's KV entries go.
        wanted: int64 [n], rows whose logits are computed, padded like the rows.
        count: how many of `wanted` were asked for.
        padding: rows that carry no token.
        tiles: the attention tiles.
        back: int64 [rows], place of each row among the rows of all tiles; None if the same.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    arena: torch.Tensor
    wanted: torch.Tensor
    count: int
    padding: int
    tiles: list[Tile]
    back: torch.Tensor | None


def pack(windows: list[Window], shapes: Shapes, stride: int, scratch: int, group: int, device: torch.device) -> Packed:
    """Lay windows out as one pass.

    Args:
        windows: at most one a slot; together at most `shapes.most_rows` tokens.
        shapes: the class of shapes to keep to.
        stride: positions a slot in the KV arena.
        scratch: arena position for padding rows.
        group: query heads a KV head.
        device: where the tensors go.
    """
    ids, positions, arena, wanted = _rows(windows, stride)
    rows = len(ids)
    padding = shapes.fit_rows(rows) - rows
    count = len(wanted)
    ids += [0] * padding
    positions += [0] * padding
    arena += [scratch] * padding
    wanted += [wanted[-1] if wanted else 0] * (shapes.fit_rows(max(count, 1)) - count)
    tiles, back = _tiles(windows, rows + padding, shapes, stride, group, device)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)

    return Packed(
        tensor(ids)[None], tensor(positions)[None], tensor(arena), tensor(wanted), count, padding, tiles, back
    )


def _tiles(
    windows: list[Window], rows: int, shapes: Shapes, stride: int, group: int, device: torch.device
) -> tuple[list[Tile], torch.Tensor | None]:
    """The windows in tiles, and the index that puts the tiles' rows back in the order of the pass."""
    pieces = _pieces(windows, shapes.most_width(group))
    tiles: list[Tile] = []
    order = np.zeros(rows, dtype=np.int64)
    base = 0
    for members in _group(pieces):
        first = min(p.slot for p in members)
        last = max(p.slot for p in members) + 1
        width = shapes.fit_width(max(p.tokens for p in members), group)
        length = shapes.fit_keys(max(p.start + p.tokens for p in members))
        positions = np.zeros((last - first, width), dtype=np.int64)
        gather = np.zeros((last - first, width), dtype=np.int64)
        for p in members:
            at, n = p.slot - first, p.tokens
            positions[at, :n] = np.arange(p.start, p.start + n)
            gather[at, :n] = np.arange(p.row, p.row + n)
            order[p.row : p.row + n] = base + at * width + np.arange(n)
        flat = gather.reshape(-1)
        plain = len(flat) == rows and bool((flat == np.arange(rows)).all())
        seen = torch.from_numpy(positions).to(device)
        take = None if plain else torch.from_numpy(flat).to(device)
        tiles.append(Tile(first, last, width, min(length, stride), seen, take))
        base += len(flat)
    whole = len(tiles) == 1 and tiles[0].gather is None
    return tiles, None if whole else torch.from_numpy(order).to(device)


class _Piece(NamedTuple):
    """Tokens of one window that stand in one tile; `whole` if they are all of it or its end."""

    tokens: int
    slot: int
    start: int
    row: int
    whole: bool


def _pieces(windows: list[Window], most: int) -> list[_Piece]:
    """The windows cut to at most `most` tokens; `row` counts the rows of the pass."""
    pieces = []
    row = 0
    for w in windows:
        for at in range(0, len(w.tokens), most):
            n = min(most, len(w.tokens) - at)
            pieces.append(_Piece(n, w.slot, w.start + at, row + at, at + n == len(w.tokens)))
        row += len(w.tokens)
    return pieces


def _rows(windows: list[Window], stride: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Token ids, positions and arena positions of all rows, and the rows whose logits are wanted."""
    ids: list[int] = []
    positions: list[int] = []
    arena: list[int] = []
    wanted: list[int] = []
    for w in windows:
        n = len(w.tokens)
        ids += w.tokens
        positions += range(w.start, w.start + n)
        at = w.slot * stride + w.start
        arena += range(at, at + n)
        wanted += range(len(ids) - w.logits, len(ids))
    return ids, positions, arena, wanted


def _group(pieces: list[_Piece]) -> list[list[_Piece]]:
    """The pieces that share a tile: the shorter ones together, the longer ones alone.

    A shared tile is as wide as its longest piece over all slots that it spans; a tile of its own costs a call. No
    slot has two pieces in one tile.
    """
    order = sorted(p for p in pieces if p.whole)
    alone = best = sum(p.tokens + _CALL for p in order)
    first, last, shared = order[0].slot, -1, 0
    for count, p in enumerate(order, 1):
        first, last = min(first, p.slot), max(last, p.slot)
        alone -= p.tokens + _CALL
        cost = (last + 1 - first) * p.tokens + _CALL + alone
        if cost < best:
            best, shared = cost, count
    together = [order[:shared]] if shared else []
    return together + [[p] for p in order[shared:]] + [[p] for p in pieces if not p.whole]


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
