"""Computes the masks of a pass's rows in a separate thread while the pass runs, which does not hold Python's lock.

Whoever chooses tokens later finds the masks (`structure.Masks`) or computes them; the result is the same.
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
    """Computes masks for the live sequences.

    Args:
        live: the live sequences.
        every: whether to compute all masks, because choosing needs whole ones (on CUDA); otherwise, only those of
            sequences that need whole masks.
    """

    def __init__(self, live: RunningBatch, *, every: bool) -> None:
        self._live, self._every = live, every
        self._thread = ThreadPoolExecutor(1, "masks")  # started on first use

    @contextmanager
    def making(self, windows: Windows) -> Iterator[Callable[[], None]]:
        """Compute the masks of the windows' rows within the context. The value is a function that waits for them."""
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
