"""Inputs of linear layers of bf16: rounded to it, once for all columns; `linear` and `core_linear` add up products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import nearest_bf16
from detgen.kernels.triton.launching import OPTIONS, tile
from detgen.program.storage import SMALLEST

_SMALLEST = tl.constexpr(SMALLEST)
_ENTRIES = 1024  # of a tile, at most


@triton.jit(do_not_specialize=("entries",))
def _narrow(x, to, entries, ENTRIES: tl.constexpr):
    """`storage.bf16` of float32, kept in float32 or bf16."""
    at = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(x + at, mask=at < entries, other=0.0)
    near = nearest_bf16(entry)
    found = tl.where(tl.abs(near) < _SMALLEST, 0.0, near)
    tl.store(to + at, tl.where(entry == entry, found, float("nan")), mask=at < entries)


def narrowed(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 of any shape, rounded, in float32 or bfloat16."""
    to = torch.empty_like(x, dtype=dtype)
    entries = tile(x.numel(), _ENTRIES)
    _narrow[(triton.cdiv(x.numel(), entries),)](x, to, x.numel(), entries, **OPTIONS)
    return to
