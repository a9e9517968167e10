"""The layers of a decoder on CUDA: few launches each, on kernels whose rows do not depend on each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.triton.kernels import Kernels
from detgen.kernels.triton.rotate import HeadNorms
from detgen.passes.description import FeedForward, Layer, Linear, Norm
from detgen.passes.stored import whole


class Pages(NamedTuple):
    """What the attention of a pass reads and writes by.

    Attributes:
        cosines: float32 [rows, rotated entries of a head / 2].
        sines: likewise.
        positions: int64 [rows].
        places: int64 [rows], where the rows' entries are stored.
        pieces: int64 [pieces, 4], as `attend` of kernels/triton takes them.
        tables: int64 [windows, blocks].
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    pieces: torch.Tensor
    tables: torch.Tensor


class RowLinear(nn.Module):
    """Linear layers that read the same rows, as one.

    Args:
        linears: the layers.
        kernels: compute the product.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs]; None for none.
    """

    def __init__(self, linears: list[Linear], kernels: Kernels) -> None:
        super().__init__()
        weights = [whole(linear.weight) for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = weights[0].detach().contiguous() if len(weights) == 1 else torch.cat(weights).detach()
        self.bias = torch.cat(biases).detach() if biases else None
        self.out_features, self.in_features = self.weight.shape
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        y = self.kernels.linear(x.reshape(-1, self.in_features), self.weight, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class ResidualNorm(nn.Module):
    """Adds to the hidden states what the last part made of them, and norms the sum."""

    def __init__(self, norm: Norm, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        assert norm.weight is not None
        self.weight, self.epsilon = norm.weight.to(dtype), norm.epsilon
        self.kernels = kernels

    def forward(self, hidden: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        """[rows, size]; `hidden` becomes the sum."""
        return self.kernels.norm(hidden, self.weight, self.epsilon, added)


class CudaLayer(nn.Module):
    """One layer.

    Args:
        layer: what it consists of.
        keys: its keys in the cache, [positions, kv_heads, size].
        values: its values, likewise.
        traits: its attention traits.
        kernels: compute it.
    """

    def __init__(
        self, layer: Layer, keys: torch.Tensor, values: torch.Tensor, traits: AttentionTraits, kernels: Kernels
    ) -> None:
        super().__init__()
        before, _, before_mlp, _ = layer.norms
        assert before is not None
        assert before_mlp is not None
        assert isinstance(layer.mlp, FeedForward)
        dtype = keys.dtype
        self.input_norm = ResidualNorm(before, dtype, kernels)
        self.qkv_proj = RowLinear(layer.qkv, kernels)
        self.o_proj = RowLinear([layer.out], kernels)
        self.mlp_norm = ResidualNorm(before_mlp, dtype, kernels)
        self.gate_up_proj = RowLinear(layer.mlp.up, kernels)
        self.down_proj = RowLinear([layer.mlp.down], kernels)
        self.kernels, self._traits = kernels, traits
        self._keys, self._values = keys, values
        self._norms = _norms_of_heads(layer, dtype)
        self._width = layer.heads * layer.size, layer.kv_heads * layer.size

    def forward(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        pages: Pages,
        longest: int,
        wanted: torch.Tensor | None,
        broken: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states and what is to be added to them, of all rows or of the wanted ones; stores the entries.

        Args:
            hidden: [rows, hidden], overwritten.
            added: what is to be added before anything else, like hidden; None for nothing.
            pages: of the attention.
            longest: positions of the longest sequence, or more.
            wanted: int64 [n]; None for all rows.
            broken: takes whether a key is not finite, bool [rows]; None if nobody asks.
        """
        projected = self.qkv_proj.forward(self.input_norm.forward(hidden, added))
        if broken is not None:
            queries, keys = self._width
            broken.copy_(projected[:, queries : queries + keys].abs().amax(1).isfinite().logical_not())
        q = self.kernels.rotate(
            projected, pages.cosines, pages.sines, pages.places, self._keys, self._values, self._norms
        )
        mixed = self.kernels.attend(
            q, self._keys, self._values, pages.positions, pages.pieces, pages.tables, longest, self._traits
        ).flatten(1)
        if wanted is not None:
            hidden, mixed = hidden.index_select(0, wanted), mixed.index_select(0, wanted)
        normed = self.mlp_norm.forward(hidden, self.o_proj.forward(mixed))
        return hidden, self.down_proj.forward(self.kernels.gate(self.gate_up_proj.forward(normed)))


def _norms_of_heads(layer: Layer, dtype: torch.dtype) -> HeadNorms | None:
    of_queries, of_keys = layer.head_norms
    if of_queries is None or of_keys is None or of_queries.weight is None or of_keys.weight is None:
        return None
    return HeadNorms(torch.stack([of_queries.weight, of_keys.weight]).to(dtype), of_queries.epsilon)
