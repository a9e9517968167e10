"""Snapshots of states at block ends, for sequences that begin with the same tokens.

A slot's states are a function of the tokens before the position that they belong to. So a copy taken at the end of a
block is valid for every slot that shares the pages up to there. It belongs to the page of that block: once the page is
taken for new content, it is no longer found. Knows no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.machine import Device
from detgen.models.memory import zeros
from detgen.program.arrays import FLOAT32
from detgen.runner.block_manager import PAGE, BlockManager, Prefix
from detgen.runner.state_cache import StateCache


class Snapshots:
    """Places for copies of slots' states.

    When all places are taken, the least recently used one is reused. Most snapshots are never used, so restored ones
    are kept longer, up to half of the places: many prompts do not displace their common beginning.

    Args:
        states: states of the slots.
        pages: pages of the KV cache, whose `snapshots` it writes.
        count: number of places, at least 1. They take no memory until they are used.
        device: device of the copies.

    Attributes:
        states: as above.
        count: as above.
    """

    def __init__(self, states: StateCache, pages: BlockManager, count: int, device: Device) -> None:
        self.states, self.count = states, count
        self._pages = pages
        self._owners: OrderedDict[int, int] = OrderedDict()  # page by place, from 1; least recently used first
        self._restored: OrderedDict[int, None] = OrderedDict()  # places to keep longer, least recently used first
        self._copies = [s and [zeros((count, *size), FLOAT32, device) for size in _sizes(s)] for s in states.shapes]

    @staticmethod
    def bytes(shapes: Sequence[StateShape | None]) -> int:
        """Return the bytes of a snapshot, all layers together."""
        return sum(4 * int(np.prod(size)) for shape in shapes if shape is not None for size in _sizes(shape))

    def shared(self, prefix: Prefix) -> Prefix:
        """Return the longest part of a prefix that ends with a snapshot: whole pages, or nothing."""
        found = self._pages.snapshots[np.array(prefix.pages, np.int64)].nonzero()[0]
        blocks = int(found[-1]) + 1 if len(found) else 0
        return Prefix(prefix.pages[:blocks], -1, blocks * PAGE, prefix.pending)

    def keep(self, slot: int, position: int, page: int) -> None:
        """Take a snapshot of a slot, unless its block has one.

        Args:
            slot: the slot.
            position: end of a block.
            page: page that is found by the block's key.

        Raises:
            ValueError: if the slot's states belong to another position.
        """
        if (at := int(self.states.at[slot])) != position:
            raise ValueError(f"slot {slot} has states of position {at}, so there is no snapshot of position {position}")
        if (place := int(self._pages.snapshots[page])) > 0:
            self._owners.move_to_end(place)
            return
        place = len(self._owners) + 1
        if place > self.count:
            place = next(place for place in self._owners if place not in self._restored)
            if self._pages.snapshots[owner := self._owners[place]] == place:
                self._pages.snapshots[owner] = 0
        for own, copy in self._pairs(slot, position, place):
            np.copyto(copy, own)
        self._owners[place] = page  # only now, so that no interruption leaves half a copy
        self._owners.move_to_end(place)
        self._pages.snapshots[page] = place

    def restore(self, slot: int, prefix: Prefix) -> None:
        """Set a slot's states to those after a prefix from `shared`, which ends with a snapshot."""
        place = int(self._pages.snapshots[prefix.pages[-1]])
        self._owners.move_to_end(place)
        self._restored[place] = None
        self._restored.move_to_end(place)
        if len(self._restored) > self.count // 2:
            self._restored.popitem(last=False)
        self.states.reach(slot + 1)
        for own, copy in self._pairs(slot, prefix.shared, place):
            np.copyto(own, copy)
        self.states.at[slot] = prefix.shared

    def _pairs(self, slot: int, position: int, place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pairs of buffers, the slot's and the place's, that hold the same parts of a snapshot of a position."""
        for shape, layer, copies in zip(self.states.shapes, self.states.layers, self._copies, strict=True):
            if shape is None or layer is None or copies is None:
                continue
            convolved, state = copies
            yield layer.state[slot], state[place - 1]
            for i in range(shape.taps - 1):
                row = (position - shape.taps + 1 + i) % layer.convolved.shape[1]
                yield layer.convolved[slot, row], convolved[place - 1, i]


def _sizes(shape: StateShape) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of a layer's part of a snapshot: the rows that its convolution reads again, and its states."""
    return (shape.taps - 1, shape.channels), (shape.heads, shape.size, shape.values)
