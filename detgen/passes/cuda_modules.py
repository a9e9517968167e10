"""Replaces modules of a transformers model on CUDA by kernels in Triton, whatever the model is.

What a module computes is guessed from its parts and checked: the replacement must give what the module's own forward
gives. What is not recognized stays as it is.
"""

from __future__ import annotations

import torch
from torch import nn

from detgen.kernels.triton.gate import ACTIVATIONS
from detgen.kernels.triton.kernels import Kernels
from detgen.passes.cuda_layers import RowLinear
from detgen.passes.description import Linear
from detgen.passes.replacing import (
    ROWS,
    FeedForwardParts,
    LinearParts,
    NormParts,
    close,
    feed_forwards_of,
    kind_of,
    linear_of,
    norms_of,
    scaled,
)

# Of the largest entry, by how much a replacement may differ: both round, and not at the same places.
_CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class CudaNorm(nn.Module):
    """A root-mean-square norm."""

    def __init__(self, parts: NormParts, kernels: Kernels) -> None:
        super().__init__()
        assert parts.weight is not None
        self.weight, self.epsilon, self.kernels = parts.weight, parts.epsilon, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.kernels.norm(rows, self.weight, self.epsilon).view(x.shape)


class CudaFeedForward(nn.Module):
    """A gated feed-forward, whose first layers are one."""

    def __init__(self, parts: FeedForwardParts, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up_proj = RowLinear([Linear(*linear) for linear in parts.up], kernels)
        self.down_proj = RowLinear([Linear(*parts.down)], kernels)
        self.activation, self.kernels = parts.activation, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        both = self.gate_up_proj.forward(x.reshape(-1, x.shape[-1]))
        return self.down_proj.forward(self.kernels.gate(both, self.activation)).view(x.shape)


@torch.no_grad()
def replace_modules(model: nn.Module, kernels: Kernels) -> None:
    """Replace what is recognized, in place: gated feed-forwards, root-mean-square norms, linear layers."""
    chosen: dict[object, int | None] = {}  # of modules of one kind, which candidate
    gone = "no module's parts"
    for name in [name for name, _ in model.named_modules() if name]:
        if name.startswith(gone):
            continue
        module = model.get_submodule(name)
        candidates = _candidates(module)
        key = kind_of(module)
        if key not in chosen:
            chosen[key] = next((i for i, one in enumerate(candidates) if _alike(module, one, kernels)), None)
        if (index := chosen[key]) is not None:
            model.set_submodule(name, _make(candidates[index], kernels))
            gone = f"{name}."


_Parts = FeedForwardParts | NormParts | LinearParts


def _candidates(module: nn.Module) -> list[_Parts]:
    """What a module may be, of all that there are kernels for."""
    found: list[_Parts] = [f for f in feed_forwards_of(module) if f.gated and f.activation in ACTIVATIONS]
    for norm in norms_of(module):
        if not norm.centred and norm.bias is None and norm.weight is not None and norm.weight.ndim == 1:
            found.append(norm)
    if (linear := linear_of(module)) is not None:
        found.append(linear)
    return found


def _make(parts: _Parts, kernels: Kernels) -> CudaFeedForward | CudaNorm | RowLinear:
    if isinstance(parts, FeedForwardParts):
        return CudaFeedForward(parts, kernels)
    return CudaNorm(parts, kernels) if isinstance(parts, NormParts) else RowLinear([Linear(*parts)], kernels)


def _alike(module: nn.Module, parts: _Parts, kernels: Kernels) -> bool:
    """Whether a module's own forward gives what the candidate gives."""
    if isinstance(parts, LinearParts):
        return True
    size = parts.shape[0] if isinstance(parts, NormParts) else len(parts.down.weight)
    like = next(module.parameters())
    x = scaled(torch.randn(1, ROWS, size, generator=torch.Generator().manual_seed(3)).to(like) + 0.5)
    try:
        own = module(x)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants other arguments
        return False
    if not isinstance(own, torch.Tensor) or own.shape != x.shape:
        return False
    return close(own, _make(parts, kernels)(x), _CLOSE[x.dtype])
