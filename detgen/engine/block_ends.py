"""Decides at which block ends sequences leave snapshots of their states, and which sequences wait for them.

If layers keep states, a prefix is shared up to a block end that has a snapshot. Copying all states is worth it at few
block ends: at the last one of what a sequence reads, for others that read the same, and where sequences with a common
prefix diverge. The chunks of a prompt end there, too. Affects only speed. Knows no tensors.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from detgen.engine.running_batch import RunningBatch
from detgen.engine.sequence import Sequence
from detgen.kernels.attention import BLOCK
from detgen.runner.block_manager import BlockManager, Prefix
from detgen.runner.snapshots import Snapshots

_FAR = 1 << 40  # positions: no end


class BlockEnds:
    """The block ends at which slots that read leave snapshots.

    Args:
        snapshots: of the target's states.
        pages: of its cache.
        live: the live sequences.

    Attributes:
        snapshots: as above.
    """

    def __init__(self, snapshots: Snapshots, pages: BlockManager, live: RunningBatch) -> None:
        self.snapshots = snapshots
        self._pages, self._live = pages, live
        self._wanted: dict[int, list[int]] = {}  # by slot: positions, ascending
        self._coming: dict[bytes, int] = {}  # by the key of the block that ends there: the slot

    def waits(self, seq: Sequence, prefix: Prefix) -> bool:
        """Return whether another sequence is about to leave a snapshot from which this one can continue.

        If that sequence is still reading the common prefix, it is asked for a snapshot at the end of the prefix.

        Args:
            seq: a sequence without a slot.
            prefix: the part of it that pages hold.
        """
        known, most = len(prefix.pages), seq.asked_from // BLOCK
        reader = self._pages.reader(seq.keys[known]) if known < most else None
        if reader is not None:
            read = self._live[reader].keys
            while known < min(most, len(read)) and seq.keys[known] == read[known]:
                known += 1
            self._want(reader, known)
            return True
        first = len(self.snapshots.shared(prefix).pages)
        return any(key in self._coming for key in seq.keys[first:known])

    def begin(self, seq: Sequence, known: Prefix, shared: Prefix) -> None:
        """Let a sequence with a slot continue after what it shares, and decide where it leaves snapshots itself.

        Args:
            seq: the sequence; its slot has the pages that it shares.
            known: the part of it that pages hold.
            shared: the part of `known` up to a snapshot.
        """
        if shared.pages:
            self.snapshots.restore(seq.slot, shared)
        for block in (len(known.pages), seq.asked_from // BLOCK):
            if block > len(shared.pages):
                self._want(seq.slot, block)

    def _want(self, slot: int, block: int) -> None:
        """Have a slot leave a snapshot after its first `block` blocks, unless one is already on the way."""
        key = self._live[slot].keys[block - 1]
        if key not in self._coming:
            self._coming[key] = slot
            insort(self._wanted.setdefault(slot, []), block * BLOCK)

    def ends(self, slots: np.ndarray) -> np.ndarray:
        """Return the position up to which each slot may be read next: int64 [n] for slots int64 [n]."""
        return np.array([next(iter(self._wanted.get(slot, ())), _FAR) for slot in slots.tolist()], np.int64)

    def leave(self, slot: int) -> None:
        """Take the snapshot that is wanted at a slot's position, if all of its entries can be found."""
        cached, keys, wanted = int(self._live.cached[slot]), self._live[slot].keys, self._wanted.get(slot)
        while wanted and wanted[0] <= cached:
            position = wanted.pop(0)
            key = keys[position // BLOCK - 1]
            del self._coming[key]
            page = self._pages.page(key)
            if position == cached == self.snapshots.states.at[slot] and page is not None:
                self.snapshots.keep(slot, position, page)

    def forget(self, slot: int) -> None:
        """Expect no more snapshots from a slot."""
        keys = self._live[slot].keys
        for position in self._wanted.pop(slot, ()):
            del self._coming[keys[position // BLOCK - 1]]
