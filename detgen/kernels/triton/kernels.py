"""The kernels of a pass, and what stands in for them where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from detgen.kernels.native.modules import NativeLinear
from detgen.kernels.sampling import Choices
from detgen.kernels.triton.attend import attend, attend_reference
from detgen.kernels.triton.gate import gate, gate_reference
from detgen.kernels.triton.linear import linear
from detgen.kernels.triton.norm import norm, norm_reference
from detgen.kernels.triton.rotate import rotate, rotate_reference
from detgen.kernels.triton.sampling import choose_by, choose_reference


class Kernels(NamedTuple):
    """Functions of tensors; each as that of its name in this package.

    Attributes:
        name: whose they are.
        attend: attention over pages.
        norm: residual and norm.
        rotate: norms of heads, rotation and the write to the cache.
        gate: gated activation.
        linear: linear layer, whose rows do not depend on how many there are.
        choose: tokens, as `sampling.choose_by`.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    norm: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    choose: Callable[[torch.Tensor, Choices | None], torch.Tensor]


_PACKED = WeakTensorKeyDictionary()


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` by the C library, in the order that docs/numerics.md states; the same weight has the same bias."""
    if weight not in _PACKED:
        _PACKED[weight] = NativeLinear(weight.cpu(), None if bias is None else bias.cpu())
    out: torch.Tensor = _PACKED[weight](x.cpu().float()).to(x)
    return out


TRITON = Kernels("triton", attend, norm, rotate, gate, linear, choose_by)
REFERENCE = Kernels(
    "torch", attend_reference, norm_reference, rotate_reference, gate_reference, linear_reference, choose_reference
)
