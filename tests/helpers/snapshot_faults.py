"""Snapshots of states broken on purpose, in one way each, as in `faults`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detgen.engine.block_ends import BlockEnds
from detgen.engine.output_processing import OutputProcessor
from detgen.engine.pass_results import Ran, Verified
from detgen.kernels.attention import BLOCK
from detgen.runner.block_manager import BlockManager
from detgen.runner.snapshots import Snapshots

Patch = pytest.MonkeyPatch


def snapshot_a_row_late(patch: Patch) -> None:
    """Chunks end a row behind a block end, and what states are there counts as those of the block end."""
    ends, leave = BlockEnds.ends, BlockEnds.leave

    def late(self: BlockEnds, slots: np.ndarray) -> np.ndarray:
        found = ends(self, slots)
        return np.where(found < 1 << 30, np.minimum(found + 1, self._live.length[slots]), found)

    def faulty(self: BlockEnds, slot: int) -> None:
        cached, at = (values[slot] for values in (self._live.cached, self.snapshots.states.at))
        late = int(cached % BLOCK == 1 and cached == at)
        self._live.cached[slot] -= late
        self.snapshots.states.at[slot] -= late
        with patch.context() as inside:
            _copied(inside, lambda slot, position: (slot, position + late))
            leave(self, slot)
        self._live.cached[slot], self.snapshots.states.at[slot] = cached, at

    patch.setattr(BlockEnds, "ends", late)
    patch.setattr(BlockEnds, "leave", faulty)


def snapshot_of_a_neighbour(patch: Patch) -> None:
    """What is copied is the next slot's."""
    keep = Snapshots.keep

    def faulty(self: Snapshots, slot: int, position: int, page: int) -> None:
        with patch.context() as inside:
            _copied(inside, lambda slot, position: ((slot + 1) % self.states.slots, position))
            keep(self, slot, position, page)

    patch.setattr(Snapshots, "keep", faulty)


def snapshot_of_a_draft(patch: Patch) -> None:
    """One is taken where a draft goes over a block end, before it is known what stands."""
    verify = OutputProcessor.verify

    def faulty(self: OutputProcessor, ran: Ran) -> Verified | None:
        ends = self._scheduler._block_ends
        for window in ran.windows if ends is not None else ():
            position = (window.start + len(window.tokens)) // BLOCK * BLOCK
            if ends is not None and window.drafted and position > window.start + 1:
                states, block = ends.snapshots.states, position // BLOCK - 1
                at, states.at[window.slot] = int(states.at[window.slot]), position
                ends.snapshots.keep(window.slot, position, int(ends._pages.tables[window.slot, block]))
                states.at[window.slot] = at
        return verify(self, ran)

    patch.setattr(OutputProcessor, "verify", faulty)


def snapshot_outlives_its_page(patch: Patch) -> None:
    """A page that is taken for new content keeps the snapshot of the old."""
    take = BlockManager._next

    def faulty(self: BlockManager) -> int:
        before = self.snapshots.copy()
        page = take(self)
        self.snapshots[page] = before[page]
        return page

    patch.setattr(BlockManager, "_next", faulty)


def _copied(patch: Patch, change: Callable[[int, int], tuple[int, int]]) -> None:
    """Copy from another slot, or as of another position."""
    pairs = Snapshots._pairs
    patch.setattr(Snapshots, "_pairs", lambda self, slot, position, place: pairs(self, *change(slot, position), place))


SNAPSHOT_FAULTS = {
    f.__name__: f
    for f in (snapshot_a_row_late, snapshot_of_a_neighbour, snapshot_of_a_draft, snapshot_outlives_its_page)
}
