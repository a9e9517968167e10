"""Packs the rows of a pass: windows of tokens in, tensors of rows and attention tiles out.

Everything that goes through a pass is a row: one token at one position of one slot. Consecutive rows of a slot make a
window; `tiles` lays windows out for attention. Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, MOST_TILE_ROWS, PERIOD, Attend
from detgen.kernels.compiled import attend_compiled
from detgen.passes.tiles import Tiles, group_pieces, pieces


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one slot that go through a pass.

    Attributes:
        slot: the slot.
        start: position of the first token in its sequence.
        tokens: the token ids.
        logits: how many of the last rows need logits.
    """

    slot: int
    start: int
    tokens: list[int]
    logits: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a pass may have.

    Attributes:
        rows: allowed row counts, ascending; every count between the first and the last one if `dense`.
        dense: see rows.
        tile_rows: the query rows of an attention tile, with padding, are a multiple of this.
        key_lengths: remainders, in (BLOCK, ..., PERIOD), of the key lengths a tile may read.
        attend: the attention implementation.
    """

    rows: tuple[int, ...]
    dense: bool
    tile_rows: int
    key_lengths: tuple[int, ...]
    attend: Attend

    def fit_rows(self, rows: int) -> int:
        """The least allowed row count that holds `rows`.

        Raises:
            ValueError: if that exceeds `most_rows`.
        """
        if rows > self.most_rows:
            raise ValueError(f"{rows} rows, where a pass may have {self.most_rows}")
        if self.dense:
            return max(rows, self.rows[0])
        return next(n for n in self.rows if n >= rows)

    def pad_query_rows(self, rows: int) -> int:
        """The least allowed number of query rows of a tile that holds `rows`."""
        return -(-rows // self.tile_rows) * self.tile_rows

    def most_width(self, group: int) -> int:
        """The most tokens per slot of a tile, with `group` query heads per KV head."""
        return max(MOST_TILE_ROWS // self.tile_rows * self.tile_rows // group, 1)

    def fit_keys(self, keys: int) -> int:
        """The least allowed key length that holds `keys`."""
        whole, rest = divmod(keys, PERIOD)
        return whole * PERIOD + (next(n for n in self.key_lengths if n >= rest) if rest else 0)

    @property
    def most_rows(self) -> int:
        """The largest allowed row count."""
        return self.rows[-1]


READ_ROWS = 512  # most rows of an unconstrained pass that reads committed tokens

# Unconstrained passes: those of the fast path and of the draft model.
FREE_SHAPES = Shapes(
    rows=(1, 1 << 30),
    dense=True,
    tile_rows=1,
    key_lengths=tuple(range(BLOCK, PERIOD + 1, BLOCK)),
    attend=attend_compiled,
)


@dataclass(slots=True)
class Packed:
    """A packed pass.

    Attributes:
        ids: int64 [rows], padding included.
        positions: int64 [rows].
        kv_positions: int64 [rows], position of each row's KV entries in the KV buffer.
        wanted: int64 [n], rows whose logits are computed, padded like the rows.
        count: how many of `wanted` are not padding.
        padding: number of padding rows.
        tiles: the attention tiles.
        last_keys: [rows, kv_heads, head_size] of the last layer, set when it attends.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor
    wanted: torch.Tensor
    count: int
    padding: int
    tiles: Tiles
    last_keys: torch.Tensor | None = None


def pack(
    windows: list[Window], shapes: Shapes, slot_size: int, scratch: int, group: int, device: torch.device
) -> Packed:
    """Lay windows out as one pass.

    Args:
        windows: at most one per slot; together at most `shapes.most_rows` tokens.
        shapes: the shapes that the pass may have.
        slot_size: positions per slot in the KV buffer.
        scratch: position of padding rows in the KV buffer.
        group: query heads per KV head.
        device: of the tensors.
    """
    spans = [(w.slot, w.start, len(w.tokens)) for w in windows]
    slots, starts, lengths = np.array(spans, dtype=np.int64).T
    ends = np.cumsum(lengths)
    count = int(ends[-1])
    rows = shapes.fit_rows(count)
    # Of each row: token id, position, position in the KV buffer.
    table = np.zeros((3, rows), dtype=np.int64)
    table[0, :count] = [token for w in windows for token in w.tokens]
    table[1, :count] = np.arange(count) + np.repeat(starts - (ends - lengths), lengths)
    table[2, :count] = table[1, :count] + np.repeat(slots * slot_size, lengths)
    table[2, count:] = scratch
    wanted = [row for w, end in zip(windows, ends.tolist(), strict=True) for row in range(end - w.logits, end)]
    asked = len(wanted)
    wanted += [wanted[-1] if wanted else 0] * (shapes.fit_rows(max(asked, 1)) - asked)
    tiles = Tiles(
        group_pieces(pieces(spans, shapes.most_width(group))),
        rows,
        group,
        shapes.pad_query_rows,
        lambda keys: min(shapes.fit_keys(keys), slot_size),
        device,
    )
    ids, positions, kv_positions = torch.from_numpy(table).to(device)
    return Packed(
        ids, positions, kv_positions, torch.from_numpy(np.array(wanted)).to(device), asked, rows - count, tiles
    )


def fill_passes(windows: list[Window], reads: list[Window], most: int) -> Iterator[list[Window]]:
    """Divide windows among passes.

    Args:
        windows: windows that go through one pass each.
        reads: windows that may be divided; the logits are those of the last part.
        most: most tokens of a pass.

    Yields:
        The windows of each pass.
    """
    batch: list[Window] = []
    free = most
    for window in windows:
        if len(window.tokens) > free:
            yield batch
            batch, free = [], most
        batch.append(window)
        free -= len(window.tokens)
    for read in reads:
        at, end = 0, len(read.tokens)
        while at < end:
            if not free:
                yield batch
                batch, free = [], most
            part = read.tokens[at : at + free]
            batch.append(Window(read.slot, read.start + at, part, read.logits if at + len(part) == end else 0))
            at += len(part)
            free -= len(part)
    if batch:
        yield batch


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
