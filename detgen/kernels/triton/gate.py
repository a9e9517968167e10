"""The gated activation of a feed-forward layer.

Promise: an element of the result depends on its gate and on its value alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS
from detgen.program.steps import Activation

_BLOCK = 1024  # elements of a program
_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
}
ACTIVATIONS = frozenset(_FUNCTIONS)  # those that the kernel has


@triton.jit
def _gate(both, out, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(both + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, mask=there, other=0.0)
    if ACTIVATION == 1:
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))  # gate * (1 + tanh(inner)) / 2
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    active = active.to(up.dtype)
    tl.store(out + row * size + at, active.to(tl.float32) * up.to(tl.float32), mask=there)


def gate(both: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """The activation of the first half of each row, times the second half.

    Args:
        both: [rows, 2 * size], contiguous.
        activation: one of `ACTIVATIONS`.

    Returns:
        [rows, size]. The activation is computed in float32 and rounded before the product, as transformers does.
    """
    rows, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, size)
    _gate[(rows, triton.cdiv(size, _BLOCK))](both, out, size, _BLOCK, int(activation), **OPTIONS)
    return out


def gate_reference(both: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """The same by PyTorch's operators; arguments as `gate`."""
    first, second = both.chunk(2, -1)
    return _FUNCTIONS[activation](first) * second
