"""Root-mean-square normalisation in one kernel instead of six.

transformers writes it out as six small operators; torch has one. Row-wise, so row-invariant; the probe covers it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + epsilon) * weight over the last axis (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., features] -> [..., features]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


# Classes whose forward is just the formula above; others (Gemma's 1 + weight, say) stay.
_PLAIN = {
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "MixtralRMSNorm",
    "Olmo2RMSNorm",
    "Phi3RMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "SmolLM3RMSNorm",
    "GraniteRMSNorm",
}


def fuse_norms(model: nn.Module) -> int:
    """Replace the float32 root-mean-square norms of `model`, in place; returns how many."""
    found = [
        (name, m)
        for name, m in model.named_modules()
        if type(m).__name__ in _PLAIN and m.weight.dtype == torch.float32 and m.weight.device.type == "cpu"
    ]
    for name, norm in found:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, FusedRMSNorm(norm.weight, norm.variance_epsilon))
    return len(found)
