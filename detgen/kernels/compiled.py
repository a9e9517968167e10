"""Attention compiled from attention.c when detgen was installed, where there was a C compiler.

Promise: that of `attention`, and more: the result of a query row has the same bits at every number of rows and keys a
tile, since each of its sums has an order of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from detgen.kernels.attention import AttentionTraits, attend_fused

_LANES = 16  # head sizes are a multiple of it
_TILE = struct.Struct("=24q2d")  # `Tile` of attention.c
# What torch calls a processor that runs vectors of so many bits.
_CAPABLE = {512: {"AVX512"}, 256: {"AVX512", "AVX2"}}


@cache
def _library() -> tuple[ctypes.CDLL, str] | None:
    """The library and a name for its build; None where it was not built, or for another processor or version."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_attention{suffix}")
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            size, bits = library.tile_bytes(), library.vector_bits()
        except (OSError, AttributeError):  # built for another system, without the OpenMP that is here, or long ago
            continue
        if size != _TILE.size or (bits in _CAPABLE and torch.backends.cpu.get_cpu_capability() not in _CAPABLE[bits]):
            continue
        return library, f"compiled {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return None


def build() -> str | None:
    """A name of the compiled attention that changes with whatever it was built from; None where there is none."""
    found = _library()
    return found and found[1]


def can_attend(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether the compiled attention is there and takes such tiles; `sizes` of the heads of keys and values."""
    usable = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return usable and not any(size % _LANES for size in sizes) and _library() is not None


def attend_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
) -> torch.Tensor:
    """Attention of one tile; `attend_fused` takes the tiles that this one does not.

    Args:
        q: as of `attend_fused`, like the others; entries of the last axis stand side by side in all of them.
        k: likewise.
        v: its head size may be another.
        mask: likewise.
        traits: likewise.

    Returns:
        [slots, kv_heads, rows, value head_size].

    Raises:
        MemoryError: if there is none for the scores.
    """
    slots, heads, rows, size = q.shape
    keys, values = k.shape[1], v.shape[3]
    found = _library() if can_attend(q.device, q.dtype, size, values) else None
    if found is None:
        return attend_fused(q, k, v, mask, traits)
    out = torch.empty(slots, rows, heads, values, dtype=q.dtype)
    tile = _TILE.pack(
        *(x.data_ptr() for x in (q, k, v, mask, out)),
        *(q.dtype == torch.bfloat16, torch.get_num_threads()),
        *(slots, heads, rows, keys, size, values),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask.stride(0), mask.stride(2)),
        *(traits.scale, traits.softcap or 0.0),
    )
    if found[0].attend(tile):
        raise MemoryError(f"no memory for the scores of {rows} rows and {keys} keys")
    return out.transpose(1, 2)
