"""The KV cache: allocated once, read and written through tables of pages.

One KV buffer per layer, made of pages that never move. On a CPU a buffer takes as much memory as was written, not its
size. Knows no requests and no models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from detgen.machine import Device
from detgen.models.memory import zeros
from detgen.program.arrays import Array, array, beside
from detgen.program.finite import bounded_array
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.state_cache import StateCache


class KVCache:
    """Values of all layers, [pages + 1, kv_heads, PAGE, head_size] each, and keys.

    The keys of a page are adjacent: [pages + 1, kv_heads, head_size, PAGE].

    Position p of slot s is at `pages.tables[s, p // PAGE] * PAGE + p % PAGE`. The last page is scratch: padding rows
    write there and nothing reads it unmasked. All entries are finite: the buffers start as zeros, and written entries
    are bounded and rounded to the number format. So an entry that overflowed harms no sequence that masks it, whether
    another request that gets the page or an earlier row of the same pass.

    Args:
        shapes: (kv_heads, key head size, value head size) of each layer; a size of 0 where values are in keys.
        pages: which slot has which pages; shared by the caches of a target and its draft model.
        dtype: number format of the entries, float32 or bfloat16.
        device: device of the buffers.
        states: states of layers that keep some, besides the pages or instead of them; None for none.

    Attributes:
        keys: keys of each layer, an array, or a tensor on CUDA.
        values: values of each layer, likewise.
        dtype: as above.
        device: as above.
        states: as above.
        positions: size of a KV buffer in token positions, without the scratch page.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int]],
        pages: BlockManager,
        dtype: np.dtype[Any],
        device: Device,
        states: StateCache | None = None,
    ) -> None:
        self.pages, self.dtype, self.device = pages, dtype, device
        self.states = states
        self.positions = pages.count * PAGE
        self.keys: list[Any] = [zeros((pages.count + 1, h, d, PAGE), dtype, device) for h, d, _ in shapes]
        self.values: list[Any] = [zeros((pages.count + 1, h, PAGE, d), dtype, device) for h, _, d in shapes]

    @property
    def scratch(self) -> int:
        """First position of the scratch page."""
        return self.positions

    @staticmethod
    def position_bytes(shapes: list[tuple[int, int, int]], dtype: np.dtype[Any]) -> int:
        """Return the bytes per position, all layers together."""
        return sum(h * (dk + dv) for h, dk, dv in shapes) * dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """Bytes of a position, all layers together."""
        return sum(int(x[0].nbytes) for x in (*self.keys, *self.values)) // PAGE

    def write(self, layer: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Store rows k and v, [rows, kv_heads, head_size], at buffer `positions`, int64 [rows], bounded and rounded."""
        keys, values, page, at = self.keys[layer], self.values[layer], positions // PAGE, positions % PAGE
        keys[page, :, :, at] = beside(bounded_array(k).astype(self.dtype), keys)
        values[page, :, at] = beside(bounded_array(v).astype(self.dtype), values)

    def read(self, layer: int, positions: np.ndarray) -> tuple[Array, Array]:
        """Return keys and values at buffer `positions`, int64 [n]; [n, kv_heads, head_size] each."""
        page, at = positions // PAGE, positions % PAGE
        return self.keys[layer][page, :, :, at], self.values[layer][page, :, at]

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of page `source` to page `target`."""
        for values in self.values:
            values[target, :, :positions] = values[source, :, :positions]
        for keys in self.keys:
            keys[target, :, :, :positions] = keys[source, :, :, :positions]

    def entries(self, slot: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of positions first..last-1 of a slot, [layers, positions, kv_heads * head_size] each.

        If layers have heads of different sizes, smaller ones are filled up with zeros.
        """
        positions = np.arange(first, last)
        at = self.pages.tables[slot][positions // PAGE] * PAGE + positions % PAGE
        keys, values = zip(*(self.read(layer, at) for layer in range(len(self.keys))), strict=True)
        return _stacked(keys), _stacked(values)


def _stacked(layers: Sequence[Array]) -> np.ndarray:
    rows = [array(layer).reshape(len(layer), math.prod(layer.shape[1:])) for layer in layers]
    most = max(row.shape[1] for row in rows)
    found = np.zeros((len(rows), len(rows[0]), most), rows[0].dtype)
    for to, row in zip(found, rows, strict=True):
        to[:, : row.shape[1]] = row
    return found
