"""The engine of a model whose layers keep states, broken on purpose, in one way each, as in `faults`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detgen.kernels.input_batch import Windows
from detgen.runner.state_cache import StateCache

Patch = pytest.MonkeyPatch


def state_not_rolled_back(patch: Patch) -> None:
    """Drafted rows move a state on, whatever becomes of them, and nothing is replayed."""

    def change(spans: np.ndarray, windows: Windows) -> None:
        spans[:, 4], spans[:, 5] = spans[:, 2], spans[:, 2] + spans[:, 3]

    _told(patch, change)


def one_row_too_many(patch: Patch) -> None:
    """The first drafted row counts as certain, and is replayed if it stands."""

    def change(spans: np.ndarray, windows: Windows) -> None:
        spans[:, 5] += (windows.provisional > 0) & (windows.provisional < windows.lengths)

    _told(patch, change)


def state_of_the_one_before(patch: Patch) -> None:
    """A sequence begins with what the last one left in its slot."""

    def change(spans: np.ndarray, windows: Windows) -> None:
        spans[:, 4] = np.maximum(spans[:, 4], spans[:, 2] == 0)

    _told(patch, change)


def state_of_a_neighbour(patch: Patch) -> None:
    """After a pass, the second window's slot has a state of the first one's."""
    move = StateCache.move

    def faulty(self: StateCache, windows: Windows) -> None:
        move(self, windows)
        if len(windows) > 1:
            first, second = windows.slots[:2].tolist()
            layer = next(layer for layer in self.layers if layer is not None)
            layer.state[second], layer.convolved[second] = layer.state[first], layer.convolved[first]

    patch.setattr(StateCache, "move", faulty)


def rejected_row_convolved(patch: Patch) -> None:
    """After a pass with a draft, the last row that stands counts as the one behind it for convolutions."""
    move = StateCache.move

    def faulty(self: StateCache, windows: Windows) -> None:
        move(self, windows)
        drafted = (windows.provisional > 0) & (windows.provisional < windows.lengths)
        for slot, at in zip(windows.slots[drafted].tolist(), self.at[windows.slots[drafted]].tolist(), strict=True):
            for layer in self.layers:
                if layer is not None:
                    ring = layer.convolved.shape[1]
                    layer.convolved[slot, (at - 1) % ring] = layer.convolved[slot, at % ring]

    patch.setattr(StateCache, "move", faulty)


def _told(patch: Patch, change: Callable[[np.ndarray, Windows], None]) -> None:
    """Change what passes are told."""
    spans = StateCache.spans

    def faulty(self: StateCache, windows: Windows) -> np.ndarray:
        found = spans(self, windows)
        change(found, windows)
        return found

    patch.setattr(StateCache, "spans", faulty)


STATE_FAULTS = {
    f.__name__: f
    for f in (
        *(state_not_rolled_back, one_row_too_many, state_of_the_one_before),
        *(state_of_a_neighbour, rejected_row_convolved),
    )
}
# Those that a convolution alone can have: it keeps rows by their positions, whatever a pass is told of states.
CONVOLUTION_FAULTS = {f.__name__: f for f in (state_of_a_neighbour, rejected_row_convolved)}
