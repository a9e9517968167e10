"""The shapes of passes on CUDA, and the device memory that passes of all shapes share.

A shape is made of row counts alone, padded to a ladder. How long contexts are changes no shape: the tables of pages,
and the results of sections of keys, have room for the longest context so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.kernels.input_batch import InputBatch
from detgen.kernels.triton.launching import send
from detgen.program.rows import Rows

# Row counts of passes: powers of two and, from 4 on, one step between them. Larger passes are not padded.
_LADDER = (1, 2, *(rung for two in (4 << i for i in range(9)) for rung in (two, two * 3 // 2)), 2048)
_LEAST_BLOCKS = 4  # of contexts, whose number is a power of two


class Key(NamedTuple):
    """The shape of passes that share a recording.

    Attributes:
        rows: number of rows.
        wanted: number of rows whose logits are wanted.
        pieces: number of pieces of their windows; less than `rows` unless each has one token.
        spans: number of windows, if the model's layers keep states; else 0.
    """

    rows: int
    wanted: int
    pieces: int
    spans: int

    @classmethod
    def of(cls, packed: InputBatch, pieces: int) -> Key:
        """Return the shape of a pass whose windows are cut into so many pieces."""
        rows = _rung(len(packed.ids))
        most = rows if pieces == len(packed.ids) else rows - 1
        spans = 0 if packed.spans is None else min(_rung(len(packed.spans)), rows)
        return cls(rows, _rung(len(packed.wanted)), min(_rung(pieces), most), spans)

    def counts(self, blocks: int) -> list[int]:
        """Return the counts of the inputs: ids, positions, places, wanted rows, pieces, spans, tables of `blocks`."""
        return [self.rows, self.rows, self.rows, self.wanted, 4 * self.pieces, 6 * self.spans, self.pieces * blocks]


class Memory:
    """Device memory that passes of all shapes share, as large as the largest of them needs.

    The results of a pass are read by the launches that follow, before the next pass.

    Args:
        outputs: entries of a row of results.
        device: where the memory is.

    Attributes:
        blocks: number of blocks of the longest context there is room for.
    """

    def __init__(self, outputs: int, device: torch.device) -> None:
        self._outputs, self._device = outputs, device
        self._sizes = [0, 0, 0]
        self.blocks = _LEAST_BLOCKS

    def reach(self, key: Key, blocks: int) -> bool:
        """Make room for passes of a shape, and for contexts of so many blocks.

        Returns:
            Whether memory has moved, or has another form, which invalidates recordings.
        """
        before, self.blocks = self.blocks, max(self.blocks, 1 << (blocks - 1).bit_length())
        needs = sum(key.counts(self.blocks)), key.wanted, key.rows
        sizes = [max(pair) for pair in zip(self._sizes, needs, strict=True)]
        if sizes != self._sizes:
            self._sizes = sizes
            self.sent = torch.zeros(sizes[0], dtype=torch.int64, device=self._device)
            self.results = torch.zeros(sizes[1], self._outputs, device=self._device)
            self.broken = torch.zeros(sizes[2], dtype=torch.int8, device=self._device)
            return True
        return before != self.blocks


class Shape:
    """The buffers of passes of a shape: their inputs and results.

    Args:
        key: the shape.
        memory: has room for them.

    Attributes:
        rows: the inputs.
        results: float32 [wanted, outputs].
        broken: int8 [rows], 1 where a key of the last layer is not finite.
        used: whether such a pass has run.
        replay: runs such a pass, once it has been recorded.
    """

    def __init__(self, key: Key, memory: Memory) -> None:
        self._key, self._counts = key, key.counts(memory.blocks)
        self._sent = memory.sent[: sum(self._counts)]
        ids, positions, places, of, cut, of_slots, tables = self._sent.split(self._counts)
        told = of_slots.view(key.spans, 6) if key.spans else None
        tables = tables.view(memory.blocks, key.pieces).T  # block by block, so that later ones need not be sent
        self.rows = Rows(ids, positions, places, of, tables, cut.view(key.pieces, 4), told)
        self.results, self.broken = memory.results[: key.wanted], memory.broken[: key.rows]
        self.used = False
        self.replay: Callable[[], None] | None = None

    def fill(self, packed: InputBatch, scratch: int, pieces: np.ndarray, tables: np.ndarray, blocks: int) -> None:
        """Send the inputs of a pass.

        Args:
            packed: the pass.
            scratch: the place of padding.
            pieces: from `InputBatch.by_pieces`, like `tables`.
            tables: the first `blocks` blocks of each are sent.
            blocks: number of blocks of the longest context.
        """
        given: list[Any] = [packed.ids, packed.positions, packed.kv_positions, packed.wanted, pieces.ravel()]
        given.append(() if packed.spans is None else packed.spans.ravel())
        blocks = min(blocks, tables.shape[1])
        ends = np.cumsum(self._counts[:-1])
        host = np.zeros(int(ends[-1]) + blocks * self._key.pieces, np.int64)
        *parts, pages = np.split(host, ends)
        for part, values, rest in zip(parts, given, (0, 0, scratch, 0, 0, 0), strict=True):
            part[: len(values)], part[len(values) :] = values, rest
        pages.reshape(blocks, -1)[:, : len(tables)] = tables[:, :blocks].T
        send(torch.from_numpy(host), self._sent[: len(host)])


def _rung(rows: int) -> int:
    """Return the least rung of the ladder that holds `rows`."""
    return next((rung for rung in _LADDER if rung >= rows), rows)
