"""Residual and root-mean-square norm in one launch.

Promise: one program computes one row, and its sum is folded in an order that depends on the row's length only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS, above


@triton.jit
def _norm(hidden, added, weight, out, size, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    there = at < size
    x = tl.load(hidden + row + at, mask=there, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(added + row + at, mask=there, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + row + at, x, mask=there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(out + row + at, normed * tl.load(weight + at, mask=there, other=0.0).to(tl.float32), mask=there)


def norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, added: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + epsilon) * weight (Zhang and Sennrich, arXiv 1910.07467) of x = hidden + added.

    Args:
        hidden: [rows, size]; becomes x, and is contiguous where something is added.
        weight: [size], in that type or in float32.
        epsilon: added to the mean square.
        added: like hidden; None for nothing.

    Returns:
        [rows, size], in the type of hidden. The mean is taken in float32, and x is rounded to that type before it is
        multiplied by the weight, as transformers does.
    """
    if added is None:
        hidden = hidden.contiguous()  # only read
    assert hidden.is_contiguous(), "it takes the sum in place"
    rows, size = hidden.shape
    out = torch.empty_like(hidden)
    more = hidden if added is None else added.contiguous()
    _norm[(rows,)](hidden, more, weight.contiguous(), out, size, epsilon, added is not None, above(size), **OPTIONS)
    return out


def norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, added: torch.Tensor | None = None
) -> torch.Tensor:
    """The same by PyTorch's operators; arguments as `norm`."""
    if added is not None:
        hidden += added
    wide = hidden.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(hidden.dtype) * weight
    return normed.to(hidden.dtype)
