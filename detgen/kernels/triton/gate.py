"""The gated activation of a feed-forward layer.

Promise: an element of the result depends on its gate and on its value alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS

_BLOCK = 1024  # elements of a program


@triton.jit
def _gate(both, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(both + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, mask=there, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * size + at, active.to(tl.float32) * up.to(tl.float32), mask=there)


def gate(both: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row, times the second half.

    Args:
        both: [rows, 2 * size], contiguous.

    Returns:
        [rows, size]. SiLU is computed in float32 and rounded before the product, as transformers does.
    """
    rows, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, size)
    _gate[(rows, triton.cdiv(size, _BLOCK))](both, out, size, _BLOCK, **OPTIONS)
    return out


def gate_reference(both: torch.Tensor) -> torch.Tensor:
    """The same by PyTorch's operators; arguments as `gate`."""
    first, second = both.chunk(2, -1)
    return F.silu(first) * second
