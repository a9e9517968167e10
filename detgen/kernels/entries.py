"""Stores rows of keys and values in the cache, in bounds.

Promise: that of `finite`. The plain reference is the pair of lines with `bounded`.
"""

from __future__ import annotations

import torch

from detgen.kernels.compiled import store_compiled
from detgen.kernels.finite import bounded, most


def store(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Store rows, bounded.

    Args:
        keys: buffer [positions, heads, size] without gaps.
        values: buffer [positions, heads, value size].
        positions: int64 [rows], where each row goes.
        k: [rows, heads, size].
        v: [rows, heads, value size].

    Returns:
        Whether all are known to have been within the bounds.
    """
    within = store_compiled(keys, values, positions, k, v, most(keys.dtype))
    if within is None:
        keys.index_copy_(0, positions, bounded(k))
        values.index_copy_(0, positions, bounded(v))
    return bool(within)
