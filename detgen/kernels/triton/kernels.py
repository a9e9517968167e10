"""The kernels of a pass, and what stands in for them where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

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
        linear: linear layer; the vendor's, as long as its rows do not depend on how many there are.
        choose: tokens, as `sampling.choose_by`.
        own_linear: the linear layer whose rows do not by construction; None if there is none.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    norm: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    choose: Callable[[torch.Tensor, Choices | None], torch.Tensor]
    own_linear: Callable[..., torch.Tensor] | None


TRITON = Kernels("triton", attend, norm, rotate, gate, F.linear, choose_by, linear)
REFERENCE = Kernels(
    "torch", attend_reference, norm_reference, rotate_reference, gate_reference, F.linear, choose_reference, None
)
