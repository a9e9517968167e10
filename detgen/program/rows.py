"""The rows of a pass, on which a program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from detgen.program.arrays import Array, tensor

if TYPE_CHECKING:
    import torch

NOT_A_NUMBER = -2  # a token id whose embedding is NaN

# Called with the name of a step and what it wrote, float32 [rows, width].
Take = Callable[[str, Array], None]


class Rows(NamedTuple):
    """The rows of a pass.

    Attributes:
        ids: int64 [rows], token ids; -1 for zeros, NOT_A_NUMBER for NaN.
        positions: int64 [rows], in their sequences.
        places: int64 [rows], where their KV entries are stored.
        wanted: int64 [n], rows whose logits are wanted.
        tables: int64 [slots, blocks], the page of each block of positions of a slot.
        pieces: int64 [pieces, 4]: consecutive tokens of a slot, the position of the first, how many, its row.
        spans: int64 [spans, 6], where layers keep states: all rows of a slot, which follow each other, as the slot,
            the first row, its position, how many there are, the position of the slot's state, at most that of the
            first row, and the position up to which rows are certain, where the state is to be after the pass.
    """

    ids: Array
    positions: Array
    places: Array
    wanted: Array
    tables: Array
    pieces: Array
    spans: Array | None = None

    def to(self, device: torch.device | str) -> Rows:
        """Return the rows as tensors on a device."""
        there = {name: tensor(x).to(device) for name, x in self._asdict().items() if x is not None}
        return Rows(**there)
