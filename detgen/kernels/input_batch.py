"""Packs the rows of a pass: windows of tokens in, arrays of rows out.

Everything that goes through a pass is a row: one token at one position of one slot. Consecutive rows of a slot make a
window. A round has hundreds of windows, so nothing here loops over them. Nothing here knows about models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from detgen.kernels.attention import BLOCK, cut_pieces, lay_out
from detgen.kernels.pass_cost import attention_area
from detgen.program.rows import Rows

MOST_ROWS = 512  # of a pass over windows and prompts


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one slot that go through a pass.

    Attributes:
        slot: the slot.
        start: position of the first token in its sequence.
        tokens: the token ids.
        logits: how many of the last rows need logits.
        drafted: how many of the last tokens may be rolled back.
    """

    slot: int
    start: int
    tokens: list[int]
    logits: int
    drafted: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of a pass as arrays.

    Attributes:
        slots: int64 [windows], the slot of each.
        starts: int64 [windows], position of its first token.
        lengths: int64 [windows], number of its tokens.
        logits: int64 [windows], how many of its last rows need logits.
        tokens: int64 [sum of `lengths`], token ids, window after window.
        drafted: int64 [windows], how many of its last tokens may be rolled back; 0 if none in any window.
    """

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray | int = 0

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Windows:
        """The same windows."""
        windows = list(windows)
        spans = np.array([(w.slot, w.start, len(w.tokens), w.logits, w.drafted) for w in windows], dtype=np.int64)
        slots, starts, lengths, logits, drafted = spans.reshape(-1, 5).T
        tokens = np.array([token for w in windows for token in w.tokens], dtype=np.int64)
        return cls(slots, starts, lengths, logits, tokens, drafted)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Window]:
        ends = np.cumsum(self.lengths)
        for i, end in enumerate(ends.tolist()):
            tokens = self.tokens[end - self.lengths[i] : end].tolist()
            yield Window(int(self.slots[i]), int(self.starts[i]), tokens, int(self.logits[i]), int(self.provisional[i]))

    @property
    def provisional(self) -> np.ndarray:
        """int64 [windows], `drafted` of each."""
        return np.broadcast_to(self.drafted, len(self.slots))

    @property
    def positions(self) -> np.ndarray:
        """int64 [sum of `lengths`], position of each token in its sequence."""
        firsts = self.starts - (self.lengths.cumsum() - self.lengths)
        found: np.ndarray = np.arange(len(self.tokens)) + np.repeat(firsts, self.lengths)
        return found

    def part(self, first: int, last: int) -> Windows:
        """Return windows first..last-1."""
        before, inside = int(self.lengths[:first].sum()), int(self.lengths[first:last].sum())
        whole = self.slots, self.starts, self.lengths, self.logits, self.provisional
        slots, starts, lengths, logits, drafted = (x[first:last] for x in whole)
        return Windows(slots, starts, lengths, logits, self.tokens[before : before + inside], drafted)

    def only(self, there: np.ndarray) -> Windows:
        """Return some of the windows, given as a bool for each."""
        whole = self.slots, self.starts, self.lengths, self.logits, self.provisional
        slots, starts, lengths, logits, drafted = (x[there] for x in whole)
        return Windows(slots, starts, lengths, logits, self.tokens[np.repeat(there, self.lengths)], drafted)

    def lasts(self) -> Windows:
        """The last token of each window that wants a row."""
        if len(self.tokens) == len(self) == self.logits.sum():
            return self
        asked = self.logits > 0
        ends, ones = self.lengths.cumsum()[asked], np.ones(int(asked.sum()), np.int64)
        return Windows(self.slots[asked], (self.starts + self.lengths)[asked] - 1, ones, ones, self.tokens[ends - 1])

    def joined(self, others: Windows) -> Windows:
        """Return these windows followed by others."""
        return Windows(
            np.concatenate((self.slots, others.slots)),
            np.concatenate((self.starts, others.starts)),
            np.concatenate((self.lengths, others.lengths)),
            np.concatenate((self.logits, others.logits)),
            np.concatenate((self.tokens, others.tokens)),
            np.concatenate((self.provisional, others.provisional)),
        )


@dataclass(slots=True)
class InputBatch:
    """A packed pass.

    Attributes:
        ids: int64 [rows].
        positions: int64 [rows].
        kv_positions: int64 [rows], position of each row's KV entries in the KV buffer.
        wanted: int64 [n], rows whose logits are computed, at least one.
        count: how many of these are asked for.
        windows: the windows.
        area: cost of the attention; see `attention_area`.
        spans: int64 [windows, 6], see `Rows`; None where no layer keeps states.
        later: windows that join in each of the passes after this one, where one call runs them all.
    """

    ids: np.ndarray
    positions: np.ndarray
    kv_positions: np.ndarray
    wanted: np.ndarray
    count: int
    windows: Windows
    area: float
    _tables: np.ndarray
    _group: int
    spans: np.ndarray | None = None
    later: Sequence[Windows] = ()
    _rows: Rows | None = None
    _choosing: tuple[Windows, np.ndarray] | None = None

    @property
    def rows(self) -> Rows:
        """The rows in the form that programs take."""
        if self._rows is None:
            w, tables = self.windows, self._tables
            pieces = lay_out(w.slots, w.starts, w.lengths, self._group)
            self._rows = Rows(self.ids, self.positions, self.kv_positions, self.wanted, tables, pieces, self.spans)
        return self._rows

    @property
    def longest(self) -> int:
        """Number of positions of the longest context."""
        return int((self.windows.starts + self.windows.lengths).max())

    def by_pieces(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows cut into pieces of at most `most` tokens, and the tables of their pages.

        Returns:
            int64 [pieces, 4], as `cut_pieces` gives them, with the index of the window instead of its slot; and int64
            [windows, blocks].
        """
        w = self.windows
        return cut_pieces(np.arange(len(w)), w.starts, w.lengths, most), self._tables[w.slots]

    @property
    def choosing(self) -> tuple[Windows, np.ndarray]:
        """The last tokens of windows that want a row, also of later ones, and their passes from this one, int64 [n]."""
        if self._choosing is None:
            lasts = [windows.lasts() for windows in (self.windows, *self.later)]
            self._choosing = reduce(Windows.joined, lasts), np.repeat(np.arange(len(lasts)), list(map(len, lasts)))
        return self._choosing

    def after(self, passes: int, there: np.ndarray) -> InputBatch:
        """Return the pass that many passes later; those of `choosing` in `there`, int64 [n], have a row each, first."""
        (w, begins), ones = self.choosing, np.ones(len(there), np.int64)
        windows = Windows(w.slots[there], (w.starts - begins)[there] + passes, ones, ones, 0 * ones)
        if passes <= len(self.later):
            windows = windows.joined(self.later[passes - 1])
        spans = None  # all rows of earlier passes are accepted, so states are where the windows start
        if self.spans is not None:
            spans = spans_of(windows, windows.starts, windows.starts + windows.lengths)
        return pack(windows, self._tables, self._group, spans)


class Ends(NamedTuple):
    """Where sequences end.

    Attributes:
        tokens: int64 [n], ids that end a sequence.
        to_end: bool [sequences], whether these ids end it.
    """

    tokens: np.ndarray
    to_end: np.ndarray


def spans_of(windows: Windows, base: np.ndarray, certain: np.ndarray) -> np.ndarray:
    """Return what layers that keep states are told about windows, int64 [windows, 6]; see `Rows`.

    Args:
        windows: the windows of a pass.
        base: int64 [windows], positions of the states.
        certain: int64 [windows], positions up to which rows are certain.
    """
    rows = windows.lengths.cumsum() - windows.lengths
    return np.stack((windows.slots, rows, windows.starts, windows.lengths, base, certain), axis=1)


def pack(
    windows: Windows,
    tables: np.ndarray,
    group: int,
    spans: np.ndarray | None = None,
    later: Sequence[Windows] = (),
) -> InputBatch:
    """Lay windows out as one pass.

    Args:
        windows: at most one per slot.
        tables: int64 [slots, blocks], the page of each block of BLOCK positions of a slot; must not change before the
            pass is over.
        group: query heads per KV head.
        spans: int64 [windows, 6], see `Rows`; None where no layer keeps states.
        later: see `InputBatch`.
    """
    lengths, logits = windows.lengths, windows.logits
    ends = np.cumsum(lengths)
    count, asked = int(ends[-1]), int(logits.sum())
    # Of each row: token id, position, position in the KV buffer.
    table = np.empty((3, count), dtype=np.int64)
    table[0] = windows.tokens
    table[1] = positions = windows.positions
    blocks, inside = np.divmod(positions, BLOCK)
    table[2] = tables[np.repeat(windows.slots, lengths), blocks] * BLOCK + inside
    wanted = np.zeros(max(asked, 1), dtype=np.int64)
    wanted[:asked] = np.arange(asked) + np.repeat(ends - np.cumsum(logits), logits)
    area = attention_area(count, int((windows.starts + lengths).sum()))
    ids, at, kv_positions = table
    return InputBatch(ids, at, kv_positions, wanted, asked, windows, area, tables, group, spans, later)


def fill_passes(windows: Windows, reads: Sequence[Window], most: int) -> Iterator[Windows]:
    """Divide windows among passes.

    Args:
        windows: windows that go through one pass each, of at most `most` tokens.
        reads: windows that may be divided; each part has the logits, and the tokens that may be rolled back, that
            belong to its tokens.
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
            wanted, drafted = (min(max(n - behind, 0), len(part)) for n in (read.logits, read.drafted))
            parts.append(Window(read.slot, read.start + at, part, wanted, drafted))
            at += len(part)
            free -= len(part)
    if parts or len(batch):
        yield batch.joined(Windows.of(parts)) if parts else batch


_NONE = Windows.of(())


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
