"""Mixture-of-experts layers whose rows do not depend on which other rows chose the same expert.

transformers groups rows by expert, so the shapes of its products, and hence the bits, depend on the neighbours. Here
each expert's weights are prepacked (see `linear`), rows are padded to the least count of the prepacked product's class,
and a row's experts are added in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from detgen.kernels.linear import PrepackedLinear

_LEAST_ROWS = 4  # fewer may run in a matrix-vector kernel


class PrepackedExperts(nn.Module):
    """Gated experts with prepacked weights.

    Args:
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        activation: function of the gate.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(PrepackedLinear(w, None) for w in gate_up)
        self.down = nn.ModuleList(PrepackedLinear(w, None) for w in down)
        self.activation = activation

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of each row's experts.

        Args:
            hidden: [rows, hidden].
            chosen: int64 [rows, experts per row].
            weights: [rows, experts per row].

        Returns:
            [rows, hidden].
        """
        out = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            part = hidden[rows]
            if len(rows) < _LEAST_ROWS:
                part = torch.cat([part, part.new_zeros(_LEAST_ROWS - len(rows), part.shape[1])])
            gate, up = self.gate_up[expert](part).chunk(2, dim=-1)
            part = self.down[expert](self.activation(gate) * up)[: len(rows)]
            out[rows] += part * weights[rows, places, None]
        return out
