"""Attention compiled from attention.c when detgen was installed, if there was a C compiler.

Promise: that of `attention`, and more: the result of a query row has the same bits at every number of rows and keys
per tile, since each of its sums has an order of its own.
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

_LANES = 16  # head sizes must be a multiple of this
_TILE = struct.Struct("=24q2d")  # `Tile` of attention.c
_ROWS = struct.Struct("=14q1d")  # `Rows`, likewise
# By vector width in bits: the CPU capabilities, as torch names them, that can run it.
_CAPABLE = {512: {"AVX512"}, 256: {"AVX512", "AVX2"}}


@cache
def _library() -> tuple[ctypes.CDLL, str] | None:
    """The library and a name for its build; None if it is missing or built for another processor or version."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_attention{suffix}")
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            sizes, bits = (library.tile_bytes(), library.rows_bytes()), library.vector_bits()
        except (OSError, AttributeError):  # built for another system, another OpenMP or by an older version
            continue
        if sizes != (_TILE.size, _ROWS.size) or (
            bits in _CAPABLE and torch.backends.cpu.get_cpu_capability() not in _CAPABLE[bits]
        ):
            continue
        return library, f"compiled {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return None


def build() -> str | None:
    """A name for the build of the compiled attention, from a hash of the file; None if there is none."""
    found = _library()
    return found and found[1]


def can_attend(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether the compiled attention exists and supports such tiles; `sizes` are the head sizes of keys and values."""
    usable = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return usable and not any(size % _LANES for size in sizes) and _library() is not None


def store_compiled(
    keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor, most: float
) -> bool | None:
    """Store rows as `entries.store` does; None if it cannot, and nothing is stored then."""
    found = _library() if keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16) else None
    if found is None or not (
        k.dtype == v.dtype == keys.dtype and k.stride(2) == v.stride(2) == positions.stride(0) == 1
    ):
        return None
    rows = _ROWS.pack(
        *(x.data_ptr() for x in (k, v, keys, values, positions)),
        *(keys.dtype == torch.bfloat16, *k.shape, v.shape[2]),
        *(*k.stride()[:2], *v.stride()[:2]),
        most,
    )
    return not found[0].store_rows(rows)


def attend_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
) -> torch.Tensor:
    """Attention of one tile; unsupported tiles go to `attend_fused`.

    Arguments as for `attend_fused`, each contiguous in its last axis; the head size of v may differ.

    Returns:
        [slots, kv_heads, rows, value head_size].

    Raises:
        MemoryError: if there is no memory for the scores.
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
