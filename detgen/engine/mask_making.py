"""Makes the masks of a pass's rows while the pass runs, in a thread of its own: the pass holds no lock of Python.

Who chooses later finds them made (`structure.Masks`), or makes them; a mask is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from detgen.engine.pass_results import WantedRows
from detgen.engine.running_batch import RunningBatch
from detgen.kernels.input_batch import Windows


class MaskMaker:
    """Makes masks for the live sequences.

    Args:
        live: the live sequences.
        every: whether tokens are chosen where masks must be whole, on CUDA; else they are made for those alone that
            need them whole.
    """

    def __init__(self, live: RunningBatch, *, every: bool) -> None:
        self._live, self._every = live, every
        self._thread = ThreadPoolExecutor(1, "masks")  # which it starts when something is to be done

    @contextmanager
    def making(self, windows: Windows) -> Iterator[Callable[[], None]]:
        """Within it, the masks of the windows' rows are being made; after it, they are, or after what it gives."""
        slots = windows.slots[windows.logits > 0]
        if not self._asked[slots].any():
            yield lambda: None
            return
        made = self._thread.submit(self._make, WantedRows.of(windows))
        try:
            yield made.result
        finally:
            made.result()

    @property
    def _asked(self) -> np.ndarray:
        return self._live.formed if self._every else self._live.masked

    def _make(self, rows: WantedRows) -> None:
        for slot, first, count in zip(rows.slots.tolist(), rows.firsts.tolist(), rows.counts.tolist(), strict=True):
            if self._asked[slot]:
                self._live[slot].make_masks(rows.drafted[first : first + count - 1].tolist())
