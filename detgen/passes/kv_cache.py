"""The KV cache: allocated once, read and written through tables of pages.

One KV buffer per layer, made of pages that nothing ever moves. On a CPU a buffer takes the memory that was written to,
not its size. Knows no requests and no models.
"""

from __future__ import annotations

import torch

from detgen.kernels.entries import store
from detgen.passes.memory import zeros
from detgen.passes.pages import PAGE, Pages


class KVCache:
    """Keys and values of all layers, [positions + PAGE, kv_heads, head_size] each.

    Position p of slot s is at `pages.tables[s, p // PAGE] * PAGE + p % PAGE`. The last page is scratch: padding rows
    write there and nothing reads it unmasked. All entries are finite: the buffers start as zeros, and what is written
    is bounded. So an entry that overflowed harms nobody who has it masked, be it another request that gets the page or
    an earlier row of the same pass.

    Args:
        shapes: (kv_heads, key head size, value head size) of each layer.
        pages: which slot has which pages; the caches of a target and of its draft model have the same.
        dtype: of the entries.
        device: of the buffers.

    Attributes:
        keys: a tensor for each layer.
        values: likewise.
        positions: size of a KV buffer in token positions, without the scratch page.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], pages: Pages, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        self.positions = pages.count * PAGE
        total = self.positions + PAGE
        self.keys = [zeros((total, h, d), dtype, device) for h, d, _ in shapes]
        self.values = [zeros((total, h, d), dtype, device) for h, _, d in shapes]

    @property
    def scratch(self) -> int:
        """The first position of the scratch page."""
        return self.positions

    @staticmethod
    def position_bytes(shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> int:
        """Bytes per position, all layers together."""
        return sum(h * (dk + dv) for h, dk, dv in shapes) * dtype.itemsize

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Store rows k and v, [rows, kv_heads, head_size], at buffer `positions`, int64 [rows].

        Returns:
            Whether all of their entries are known to have been within the bounds.
        """
        return store(self.keys[layer], self.values[layer], positions, k, v)

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of page `source` to page `target`."""
        for buffer in (*self.keys, *self.values):
            at, to = source * PAGE, target * PAGE
            buffer[to : to + positions] = buffer[at : at + positions]

    def entries(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first..last-1 of a slot, [layers, positions, kv_heads * head_size] each."""
        table = torch.from_numpy(self.pages.tables[slot])
        positions = torch.arange(first, last)
        at = (table[positions // PAGE] * PAGE + positions % PAGE).to(self.keys[0].device)
        stack = lambda buffers: torch.stack([b[at].flatten(1) for b in buffers])  # noqa: E731
        return stack(self.keys), stack(self.values)
