"""A Llama decoder layer in as few operators as it takes.

At the row counts of decoding, transformers' layer spends more time between its operators than in them. This one does
the same arithmetic: query, key and value in one product, their rotation in three operators for both at once, no
modules in between. It stands in for the layers named in `_PLAIN`, whose forward is just that; the probe compares the
result with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from detgen.kernels.linear import JoinedLinear, PackedLinear
from detgen.kernels.norm import FusedRMSNorm

# Attention of the pass in progress: layer, q, k, v, scale, window, softcap; see `Forward.attend`.
AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None, float | None], torch.Tensor]

# Classes that are: norm, rotary attention, residual, norm, gated SiLU, residual.
_PLAIN = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}


class _Rotation:
    """Cosines and signed sines of a pass, shared by its layers."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, 1, head_size] each; the first half of the sines is negated, so that a roll replaces a rotation."""
        if self._source is not cos:
            half = sin.shape[-1] // 2
            self._source = cos
            self._cos = cos[0].unsqueeze(1)
            self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).unsqueeze(1)
        return self._cos, self._sin


class LeanDecoderLayer(nn.Module):
    """Takes the place of one decoder layer whose linears are joined and norms fused.

    Args:
        layer: the transformers layer.
        rotation: shared by the layers of the model.
        attend: attention of the pass in progress.
        scale: factor of the attention scores.
        window: size of the sliding window, None for full attention.
    """

    def __init__(self, layer: Any, rotation: _Rotation, attend: AttendRows, scale: float, window: int | None) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.head_size: int = attention.head_dim
        self.scale, self.window = scale, window
        self.norm_in, self.norm_mid = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv: PackedLinear = attention.q_proj.joined.packed
        self.out: PackedLinear = attention.o_proj
        self.gate_up: PackedLinear = mlp.gate_proj.joined.packed
        self.down: PackedLinear = mlp.down_proj
        self.kv_heads: int = attention.k_proj.out_features // self.head_size
        self._rotation, self._attend = rotation, attend

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """[1, rows, hidden] -> [1, rows, hidden]."""
        rows = hidden.shape[1]
        cos, sin = self._rotation.of(*position_embeddings)
        heads = self.qkv(self.norm_in(hidden)).view(rows, -1, self.head_size)
        turned, v = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        turned = torch.addcmul(turned * cos, turned.roll(self.head_size // 2, -1), sin)
        q, k = turned[:, : -self.kv_heads], turned[:, -self.kv_heads :]
        mixed = self._attend(
            self.index, q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
            self.scale, self.window, None,
        )  # fmt: skip
        hidden = hidden + self.out(mixed.reshape(1, rows, -1))
        gate, up = self.gate_up(self.norm_mid(hidden)).chunk(2, dim=-1)
        out: torch.Tensor = hidden + self.down(F.silu(gate).mul_(up))
        return out


def lean_layers(model: nn.Module, attend: AttendRows, traits: Sequence[tuple[float, int | None]]) -> int:
    """Replace the decoder layers of known classes, in place, where `pack_linears` and `fuse_norms` have been.

    Args:
        model: a transformers decoder.
        attend: attention of the pass in progress.
        traits: scale and sliding window that each layer was seen to ask of its attention.

    Returns:
        How many were replaced.
    """
    rotation = _Rotation()
    found = [(name, m) for name, m in model.named_modules() if type(m).__name__ in _PLAIN and _prepared(m)]
    for name, layer in found:
        owner, _, child = name.rpartition(".")
        scale, window = traits[layer.self_attn.layer_idx]
        setattr(model.get_submodule(owner), child, LeanDecoderLayer(layer, rotation, attend, scale, window))
    return len(found)


def _prepared(layer: Any) -> bool:
    """Whether the layer has just the parts that the lean one takes over."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        all(isinstance(m, JoinedLinear) for m in (attention.q_proj, attention.k_proj, mlp.gate_proj))
        and all(isinstance(m, PackedLinear) for m in (attention.o_proj, mlp.down_proj))
        and all(isinstance(m, FusedRMSNorm) for m in (layer.input_layernorm, layer.post_attention_layernorm))
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )
