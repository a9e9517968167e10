"""States that layers keep of sequences, by slot, besides the KV cache: see `detgen.program.states`.

A state belongs to a position and cannot be set back. So rows whose tokens may be rejected leave their inputs in a ring
of positions, and the next pass of the slot replays those that were accepted. Knows no requests and no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detgen.kernels.decoder import LayerStates, StateShape
from detgen.kernels.input_batch import Windows, spans_of
from detgen.machine import Device
from detgen.models.memory import zeros
from detgen.program.arrays import FLOAT32

MOST_DRAFTED = 15  # most rows of a window whose tokens may be rejected
_RING = 2 * MOST_DRAFTED + 1  # for rows to replay, and those of the next window


class StateCache:
    """The states of layers, in float32.

    Args:
        shapes: shape of each layer's states; None for a layer without any.
        slots: number of slots to make room for at first.
        device: device of the buffers.

    Attributes:
        shapes: as above.
        layers: states of each layer; replaced when there are more slots.
        at: int64 [slots], position that a slot's states belong to.
    """

    def __init__(self, shapes: Sequence[StateShape | None], slots: int, device: Device) -> None:
        self.shapes, self._device = shapes, device
        self.at = np.zeros(slots, np.int64)
        self.layers = self._made(slots)

    @property
    def slots(self) -> int:
        """Number of slots that there is room for."""
        return len(self.at)

    @staticmethod
    def slot_bytes(shapes: Sequence[StateShape | None]) -> int:
        """Return the bytes of a slot, all layers together."""
        return sum(4 * int(np.prod(size)) for shape in shapes if shape is not None for size in _sizes(shape))

    def spans(self, windows: Windows) -> np.ndarray:
        """Return a pass's facts about its slots, int64 [windows, 6], see `Rows`; windows at position 0 start anew.

        Raises:
            ValueError: if a window cannot continue from its slot's states.
        """
        self.reach(int(windows.slots.max()) + 1)
        slots, starts, lengths = windows.slots, windows.starts, windows.lengths
        base = np.where(starts > 0, self.at[slots], 0)
        kept = np.where(windows.provisional > 0, starts + lengths, starts) - base
        lost = (base > starts) | (kept > _RING)
        if lost.any():
            slot = int(slots[lost.argmax()])
            raise ValueError(f"slot {slot} has states of position {self.at[slot]}, from which its window cannot go on")
        return spans_of(windows, base, _certain(windows, base))

    def move(self, windows: Windows, further: np.ndarray | int = 0) -> None:
        """Record that a pass of these windows has run, and `further` accepted passes of one row each after it."""
        base = np.where(windows.starts > 0, self.at[windows.slots], 0)
        self.at[windows.slots] = _certain(windows, base) + further

    def reach(self, slots: int) -> None:
        """Make room for that many slots."""
        before, kept = self.layers, self.slots
        if slots <= kept:
            return
        self.at = np.concatenate((self.at, np.zeros(max(slots, 2 * kept) - kept, np.int64)))
        self.layers = self._made(self.slots)
        for old, new in zip(before, self.layers, strict=True):
            for was, now in zip(old or (), new or (), strict=True):
                now[:kept] = was

    def _made(self, slots: int) -> list[LayerStates | None]:
        return [
            None if s is None else LayerStates(*(zeros((slots, *size), FLOAT32, self._device) for size in _sizes(s)))
            for s in self.shapes
        ]


def _certain(windows: Windows, base: np.ndarray) -> np.ndarray:
    """Return the position up to which rows are certain, int64 [windows]."""
    certain: np.ndarray = windows.starts + windows.lengths - windows.provisional
    # A drafter's own rows do not move a state on, since what it read before may be its own, too.
    return np.where(windows.provisional < windows.lengths, certain, base)


def _sizes(shape: StateShape) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of a slot's buffers, in the order of `LayerStates`."""
    return (
        (MOST_DRAFTED + shape.taps, shape.channels),
        (shape.heads, shape.size, shape.values),
        (_RING, shape.kept),
    )
