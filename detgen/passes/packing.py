"""Packs the rows of a pass: windows of tokens in, tensors of rows out.

Everything that goes through a pass is a row: one token at one position of one slot. Consecutive rows of a slot make a
window. A round has hundreds of windows, so there are no loops over them here. Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from detgen.kernels.attention import (
    BLOCK,
    MOST_TILE_ROWS,
    PERIOD,
    Attend,
    AttentionTraits,
    attend_blocks,
    attend_fused,
    cut_pieces,
    lay_out,
)
from detgen.passes.tiles import Tiles, attention_area


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


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of a pass as arrays.

    Attributes:
        slots: int64 [windows], the slot of each.
        starts: int64 [windows], position of its first token.
        lengths: int64 [windows], number of its tokens.
        logits: int64 [windows], how many of its last rows need logits.
        tokens: int64 [sum of `lengths`], token ids, window after window.
    """

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Windows:
        """The same windows."""
        windows = list(windows)
        spans = np.array([(w.slot, w.start, len(w.tokens), w.logits) for w in windows], dtype=np.int64)
        slots, starts, lengths, logits = spans.reshape(-1, 4).T
        tokens = np.array([token for w in windows for token in w.tokens], dtype=np.int64)
        return cls(slots, starts, lengths, logits, tokens)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Window]:
        ends = np.cumsum(self.lengths)
        for i, end in enumerate(ends.tolist()):
            tokens = self.tokens[end - self.lengths[i] : end].tolist()
            yield Window(int(self.slots[i]), int(self.starts[i]), tokens, int(self.logits[i]))

    @property
    def positions(self) -> np.ndarray:
        """int64 [sum of `lengths`], position of each token in its sequence."""
        firsts = self.starts - (self.lengths.cumsum() - self.lengths)
        found: np.ndarray = np.arange(len(self.tokens)) + np.repeat(firsts, self.lengths)
        return found

    def part(self, first: int, last: int) -> Windows:
        """Windows first..last-1."""
        before, inside = int(self.lengths[:first].sum()), int(self.lengths[first:last].sum())
        slots, starts, lengths, logits = (x[first:last] for x in (self.slots, self.starts, self.lengths, self.logits))
        return Windows(slots, starts, lengths, logits, self.tokens[before : before + inside])

    def joined(self, others: Windows) -> Windows:
        """These, then others."""
        return Windows(
            np.concatenate((self.slots, others.slots)),
            np.concatenate((self.starts, others.starts)),
            np.concatenate((self.lengths, others.lengths)),
            np.concatenate((self.logits, others.logits)),
            np.concatenate((self.tokens, others.tokens)),
        )


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a pass may have.

    Attributes:
        rows: allowed row counts, ascending; every count between the first and the last one if `dense`.
        dense: see rows.
        tile_rows: the query rows of an attention tile, with padding, are a multiple of this.
        key_lengths: remainders, in (BLOCK, ..., PERIOD), of the key lengths a tile may read.
        attend: computes the attention of a tile; None for `attend_fused`, or `attend_blocks` on CUDA. Attention over
            pages needs none.
    """

    rows: tuple[int, ...]
    dense: bool
    tile_rows: int
    key_lengths: tuple[int, ...]
    attend: Attend | None

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


# Row counts of passes that are recorded, and of all others of the same decoder.
LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
READ_ROWS = 512  # most rows of an unconstrained pass that reads committed tokens

# Unconstrained passes: those of the draft model.
FREE_SHAPES = Shapes(
    rows=(1, 1 << 30),
    dense=True,
    tile_rows=1,
    key_lengths=tuple(range(BLOCK, PERIOD + 1, BLOCK)),
    attend=None,
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
        windows: the windows.
        area: cost of their attention, in places; see `attention_area`.
        last_keys: [rows, kv_heads, head_size] of the last layer, set when it attends.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor
    wanted: torch.Tensor
    count: int
    padding: int
    windows: Windows
    area: float
    _shapes: Shapes
    _tables: np.ndarray
    _scratch: int
    _group: int
    last_keys: torch.Tensor | None = None
    _paged: tuple[torch.Tensor, torch.Tensor] | None = None
    _tiles: Tiles | None = None

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of pages, int64 [slots, blocks], and the windows as `lay_out` gives them."""
        if self._paged is None:
            w = self.windows
            self._paged = torch.from_numpy(self._tables), lay_out(w.slots, w.starts, w.lengths, self._group)
        return self._paged

    @property
    def any_rows(self) -> bool:
        """Whether it may have more rows than these."""
        return self._shapes.dense

    @property
    def longest(self) -> int:
        """Positions of the longest context."""
        return int((self.windows.starts + self.windows.lengths).max())

    def by_pieces(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows cut into pieces of at most `most` tokens, and the tables of their pages.

        Returns:
            int64 [pieces, 4], as `cut_pieces` gives them, with the index of the window instead of its slot; and int64
            [windows, blocks].
        """
        w = self.windows
        return cut_pieces(np.arange(len(w)), w.starts, w.lengths, most), self._tables[w.slots]

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        """Attention of all rows of the pass in one layer.

        Args:
            q: [rows, heads, head_size].
            keys: the layer's keys in the cache, [positions, kv_heads, head_size].
            values: its values, [positions, kv_heads, value head_size].
            traits: the layer's attention traits.

        Returns:
            [rows, heads, value head_size]; of padding rows, something finite.
        """
        if self._tiles is None:
            self._tiles = self.tiles()
        usual = attend_fused if q.device.type == "cpu" else attend_blocks
        return self._tiles.attend(q, keys, values, self._shapes.attend or usual, traits)

    def tiles(self) -> Tiles:
        """The windows laid out in tiles, for attention by torch's operators."""
        w, shapes = self.windows, self._shapes
        pieces = cut_pieces(w.slots, w.starts, w.lengths, shapes.most_width(self._group))
        return Tiles(
            *(pieces, self._tables, self._scratch // BLOCK, len(self.ids), self._group),
            *(shapes.pad_query_rows, shapes.fit_keys, self.ids.device),
        )


def pack(
    windows: Windows, shapes: Shapes, tables: np.ndarray, scratch: int, group: int, device: torch.device
) -> Packed:
    """Lay windows out as one pass.

    Args:
        windows: at most one per slot; together at most `shapes.most_rows` tokens.
        shapes: the shapes that the pass may have.
        tables: int64 [slots, blocks], the page of each block of BLOCK positions of a slot; must not change before the
            pass is over.
        scratch: position of padding rows in the KV buffer, the first one of a page.
        group: query heads per KV head.
        device: of the tensors.
    """
    lengths, logits = windows.lengths, windows.logits
    ends = np.cumsum(lengths)
    count, asked = int(ends[-1]), int(logits.sum())
    rows = shapes.fit_rows(count)
    # Of each row: token id, position, position in the KV buffer.
    table = np.zeros((3, rows), dtype=np.int64)
    table[0, :count] = windows.tokens
    table[1, :count] = positions = windows.positions
    blocks, inside = np.divmod(positions, BLOCK)
    table[2, :count] = tables[np.repeat(windows.slots, lengths), blocks] * BLOCK + inside
    table[2, count:] = scratch
    wanted = np.zeros(shapes.fit_rows(max(asked, 1)), dtype=np.int64)
    wanted[:asked] = np.arange(asked) + np.repeat(ends - np.cumsum(logits), logits)
    wanted[asked:] = wanted[asked - 1] if asked else 0
    ids, at, kv_positions = torch.from_numpy(table).to(device)
    area = attention_area(count, int((windows.starts + lengths).sum()))
    return Packed(
        *(ids, at, kv_positions, torch.from_numpy(wanted).to(device), asked, rows - count),
        *(windows, area, shapes, tables, scratch, group),
    )


def fill_passes(windows: Windows, reads: Sequence[Window], most: int) -> Iterator[Windows]:
    """Divide windows among passes.

    Args:
        windows: windows that go through one pass each, of at most `most` tokens.
        reads: windows that may be divided; each part has those of the logits that are of its tokens.
        most: most tokens of a pass.

    Yields:
        The windows of each pass.
    """
    ends = np.cumsum(windows.lengths)
    first = before = 0
    while len(windows) and ends[-1] - before > most:
        last = int(np.searchsorted(ends, before + most, side="right"))
        yield windows.part(first, last)
        first, before = last, int(ends[last - 1])
    batch = windows.part(first, len(windows)) if first else windows
    free = most - len(batch.tokens)
    parts: list[Window] = []
    for read in reads:
        at, end = 0, len(read.tokens)
        while at < end:
            if not free:
                yield batch.joined(Windows.of(parts))
                batch, parts, free = _NONE, [], most
            part = read.tokens[at : at + free]
            behind = end - at - len(part)
            parts.append(Window(read.slot, read.start + at, part, min(max(read.logits - behind, 0), len(part))))
            at += len(part)
            free -= len(part)
    if parts or len(batch):
        yield batch.joined(Windows.of(parts)) if parts else batch


_NONE = Windows.of(())


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
