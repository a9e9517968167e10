"""Attention by kernels in Triton for forwards that are not made of such kernels themselves."""

from __future__ import annotations

import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.triton.attend import most_tokens
from detgen.kernels.triton.kernels import Kernels
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Packed


class CudaAttention:
    """Stores keys and values in place and attends over pages; one pass at a time.

    Args:
        cache: keys and values.
        kernels: compute it.
    """

    def __init__(self, cache: KVCache, kernels: Kernels) -> None:
        self._cache, self._kernels = cache, kernels
        self._sent: tuple[Packed, int, tuple[torch.Tensor, ...]] | None = None  # of the pass in progress

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, traits: AttentionTraits
    ) -> torch.Tensor:
        """Attention of the rows of a pass in one layer; arguments and result as those of `NativeAttention.attend`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        places, positions, pieces, tables = self._pass(packed, most_tokens(q.shape[1] // keys.shape[1]), q.device)
        self._cache.write(layer, places, k, v)
        return self._kernels.attend(q.contiguous(), keys, values, positions, pieces, tables, packed.longest, traits)

    def _pass(self, packed: Packed, most: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What the layers of a pass share, sent to the device once: places, positions, pieces and tables of pages."""
        if self._sent is None or self._sent[0] is not packed or self._sent[1] != most:
            pieces, tables = (torch.from_numpy(x) for x in packed.by_pieces(most))
            shared = packed.kv_positions, packed.positions, pieces, tables
            self._sent = packed, most, tuple(x.to(device) for x in shared)
        return self._sent[2]
