"""Root-mean-square normalization in one kernel instead of six.

transformers computes it by six small operators; torch has one. Row-wise, hence row-invariant; the probe covers it.
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
