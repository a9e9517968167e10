"""Attention compiled from attention.c when detgen was installed, if there was a C compiler.

Promise: that of `attention`, and more: the result of a query row has the same bits whatever rows stand beside it and
whichever pages hold its keys, since each of its sums has an order of its own. It needs no tiles and no masks, and reads
keys and values where they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from detgen.kernels.attention import AttentionTraits, cut_pieces
from detgen.kernels.library import load

_LANES = 16  # head sizes must be a multiple of this
_SHARING = 64  # query rows per KV head that share transposed keys; more would take more memory than they save time
_PASS = struct.Struct("=18q2d")  # `Pass` of attention.c
_STORED = struct.Struct("=14q1d")  # `Stored`, likewise
# Attention of all rows of a pass; arguments as `attend_compiled`.
AttendPages = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionTraits], torch.Tensor
]


@cache
def _library() -> tuple[ctypes.CDLL, str] | None:
    """The library and a name for its build; None if it is missing or built for another processor or version."""
    library = load("_attention", pass_bytes=_PASS.size, stored_bytes=_STORED.size)
    if library is None:
        return None
    return library, f"compiled {hashlib.sha256(Path(library._name).read_bytes()).hexdigest()[:12]}"


def build() -> str | None:
    """A name for the build of the compiled attention, from a hash of the file; None if there is none."""
    found = _library()
    return found and found[1]


def can_attend(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether the compiled attention exists and supports such a cache, with keys and values of these head sizes."""
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
    rows = _STORED.pack(
        *(x.data_ptr() for x in (k, v, keys, values, positions)),
        *(keys.dtype == torch.bfloat16, *k.shape, v.shape[2]),
        *(*k.stride()[:2], *v.stride()[:2]),
        most,
    )
    return not found[0].store_rows(rows)


def lay_out(slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, group: int) -> torch.Tensor:
    """Windows as `attend_compiled` takes them: cut into pieces, for threads to take one after the other.

    Args:
        slots: int64 [windows].
        starts: int64 [windows], position of the first token.
        lengths: int64 [windows], number of tokens; the rows of the pass are those of the windows in order.
        group: query heads per KV head.

    Returns:
        int64 [pieces, 4]; see `cut_pieces`. The longest come first, so that no thread is left with one at the end.
    """
    pieces = cut_pieces(slots, starts, lengths, max(_SHARING // group, 1))
    work = (pieces[:, 1] + pieces[:, 2]) * (pieces[:, 2] + 1)
    return torch.from_numpy(pieces[np.argsort(-work, kind="stable")])


def attend_compiled(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    pieces: torch.Tensor,
    traits: AttentionTraits,
) -> torch.Tensor:
    """Attention of all rows of a pass over the pages of a cache that `can_attend` allows.

    Args:
        q: [rows, heads, size], those of the pieces first; the others are padding.
        keys: [positions, kv_heads, size] without gaps; all entries `bounded`.
        values: [positions, kv_heads, value size], likewise.
        tables: int64 [slots, blocks] without gaps, the page of each block of BLOCK positions.
        pieces: the result of `lay_out`.
        traits: the layer's attention traits.

    Returns:
        [rows, heads, value size]; zeros for padding.

    Raises:
        MemoryError: if there is no memory for the scores.
    """
    found = _library()
    assert found is not None, "see `can_attend`"
    assert q.dtype == keys.dtype == values.dtype
    if q.stride(2) != 1:
        q = q.contiguous()
    rows, heads, size = q.shape
    _, kv_heads, value_size = values.shape
    out = torch.empty(rows, heads, value_size, dtype=q.dtype)
    described = _PASS.pack(
        *(x.data_ptr() for x in (q, keys, values, out, tables, pieces)),
        *(q.dtype == torch.bfloat16, torch.get_num_threads()),
        *(rows, len(pieces), tables.shape[1], heads // kv_heads, kv_heads, size, value_size, *q.stride()[:2]),
        *(traits.window or 0, traits.scale, traits.softcap or 0.0),
    )
    if found[0].attend(described):
        raise MemoryError(f"no memory for the scores of {rows} rows")
    return out
