"""The KV cache: allocated once, truncated in place.

One KV buffer per layer, cut into slots of equal size; cutting it again for longer requests moves no memory. On a CPU a
buffer takes the memory that was written to, not its size. Knows no requests and no models.
"""

from __future__ import annotations

import torch

from detgen.kernels.entries import store
from detgen.passes.memory import zeros


class KVCache:
    """Keys and values of all layers, [positions + 1, kv_heads, head_size] each.

    The last position is scratch: padding rows write there and nothing reads it. All entries are finite: the buffers
    start as zeros, and what is written is bounded. So an entry that overflowed harms nobody who has it masked, be it
    another request that gets the slot or an earlier row of the same pass.

    Args:
        shapes: (kv_heads, key head size, value head size) of each layer.
        positions: size of a KV buffer in token positions.
        dtype: of the entries.
        device: of the buffers.

    Attributes:
        slot_size: positions per slot.
        slots: number of slots.
        cuts: how often the buffers were cut into slots.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.positions = positions
        self.keys = [zeros((positions + 1, h, d), dtype, device) for h, d, _ in shapes]
        self.values = [zeros((positions + 1, h, d), dtype, device) for h, _, d in shapes]
        self.slot_size = 0
        self.slots = 0
        self.cuts = 0

    @property
    def scratch(self) -> int:
        """The position for padding rows."""
        return self.positions

    @staticmethod
    def position_bytes(shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> int:
        """Bytes per position, all layers together."""
        return sum(h * (dk + dv) for h, dk, dv in shapes) * dtype.itemsize

    def partition(self, slot_size: int, slots: int) -> None:
        """Cut the buffers into `slots` slots of `slot_size` positions; earlier entries become meaningless.

        Raises:
            ValueError: if they do not fit the buffers.
        """
        if slot_size * slots > self.positions:
            raise ValueError(f"{slots} slots of {slot_size} positions exceed the KV buffer of {self.positions}")
        self.slot_size, self.slots = slot_size, slots
        self.cuts += 1
        n = slot_size * slots
        self._key_views = [k[:n].view(slots, slot_size, *k.shape[1:]) for k in self.keys]
        self._value_views = [v[:n].view(slots, slot_size, *v.shape[1:]) for v in self.values]

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Store rows k and v, [rows, kv_heads, head_size], at buffer `positions`, int64 [rows].

        Returns:
            Whether all of their entries are known to have been within the bounds.
        """
        return store(self.keys[layer], self.values[layer], positions, k, v)

    def read(self, layer: int, first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [last - first, length, kv_heads, head_size] of the keys and values of slots first..last-1."""
        return self._key_views[layer][first:last, :length], self._value_views[layer][first:last, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for views in (self._key_views, self._value_views):
            for view in views:
                view[target, :length] = view[source, :length]

    def entries(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first..last-1 of a slot, [layers, positions, kv_heads * head_size] each."""
        stack = lambda views: torch.stack([v[slot, first:last].flatten(1) for v in views])  # noqa: E731
        return stack(self._key_views), stack(self._value_views)
