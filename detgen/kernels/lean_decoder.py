"""A Llama decoder in as few operators as it takes.

At the row counts of decoding, transformers' forward spends more time between its operators than in them. This one
does the same arithmetic: query, key and value in one product, their rotation in three operators for both at once,
rows without a batch axis, no modules in between. It stands in for the decoders named in `_PLAIN`, whose forward is
just that; the probe compares the result with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from detgen.kernels.activation import RowwiseActivation, rowwise
from detgen.kernels.linear import JoinedLinear, PackedLinear
from detgen.kernels.norm import FusedRMSNorm

# Attention of the pass in progress: layer, q, k, v, scale, window, softcap; see `Forward.attend`.
AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None, float | None], torch.Tensor]

# Decoders of: embedding; layers of norm, rotary attention, residual, norm, gated SiLU, residual; norm; output layer.
_PLAIN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}


class LeanDecoderLayer(nn.Module):
    """One layer, whose linears are joined and norms fused.

    Args:
        layer: the transformers layer.
        attend: attention of the pass in progress.
        scale: factor of the attention scores.
        window: size of the sliding window, None for full attention.
    """

    def __init__(self, layer: Any, attend: AttendRows, scale: float, window: int | None) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.head_size: int = attention.head_dim
        self.kv_heads: int = attention.k_proj.out_features // self.head_size
        self.scale, self.window = scale, window
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.qkv_proj: PackedLinear = attention.q_proj.joined.packed
        self.o_proj: PackedLinear = attention.o_proj
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        self.gate_up_proj: PackedLinear = mlp.gate_proj.joined.packed
        self.down_proj: PackedLinear = mlp.down_proj
        self._attend = attend

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states of all rows, or of those wanted: their keys and values are stored in any case.

        Args:
            hidden: [rows, hidden].
            cos: [rows, 1, head_size].
            sin: likewise, the first half negated.
            wanted: int64 [n], None for all.

        Returns:
            [rows or n, hidden].
        """
        rows = hidden.shape[0]
        heads = self.qkv_proj(self.input_layernorm(hidden)).view(rows, -1, self.head_size)
        turned, v = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        # With half of the sines negated, a roll does what transformers' rotate_half does.
        turned = torch.addcmul(turned * cos, turned.roll(self.head_size // 2, -1), sin)
        q, k = turned[:, : -self.kv_heads], turned[:, -self.kv_heads :]
        mixed = self._attend(self.index, q, k, v, self.scale, self.window, None)
        mixed = mixed.view(rows, -1)
        if wanted is not None:
            hidden, mixed = hidden.index_select(0, wanted), mixed.index_select(0, wanted)
        hidden = hidden + self.o_proj(mixed)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        out: torch.Tensor = hidden + self.down_proj(rowwise(F.silu, gate).mul_(up))
        return out


class LeanDecoder(nn.Module):
    """A whole decoder; takes the parts of `model`.

    Attributes:
        kind: class of the model.
    """

    def __init__(self, model: Any, layers: list[LeanDecoderLayer]) -> None:
        super().__init__()
        self.kind = type(model).__name__
        self.embed_tokens: nn.Module = model.model.embed_tokens
        self.rotary_emb: nn.Module = model.model.rotary_emb
        self.layers = nn.ModuleList(layers)
        self.norm: nn.Module = model.model.norm
        self.lm_head: nn.Module = model.lm_head

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of the rows `wanted`, int64 [n]; ids and positions int64 [rows]."""
        hidden = self.embed_tokens(ids)
        cos, sin = (x[0].unsqueeze(1) for x in self.rotary_emb(hidden[None], positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, cos, sin)
        out: torch.Tensor = self.lm_head(self.norm(last(hidden, cos, sin, wanted)))
        return out


def lean_decoder(model: Any, attend: AttendRows, traits: Sequence[tuple[float, int | None]]) -> LeanDecoder | None:
    """A lean decoder of a model whose linears, norms and activations have been replaced; None if it is of another kind.

    Args:
        model: a transformers decoder.
        attend: attention of the pass in progress.
        traits: scale and sliding window that each layer was seen to ask of its attention.
    """
    if type(model).__name__ not in _PLAIN or not all(_prepared(layer) for layer in model.model.layers):
        return None
    layers = [LeanDecoderLayer(layer, attend, *traits[layer.self_attn.layer_idx]) for layer in model.model.layers]
    return LeanDecoder(model, layers)


def _prepared(layer: Any) -> bool:
    """Whether the layer has just the parts that the lean one takes over."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        all(isinstance(m, JoinedLinear) for m in (attention.q_proj, attention.k_proj, mlp.gate_proj))
        and all(isinstance(m, PackedLinear) for m in (attention.o_proj, mlp.down_proj))
        and all(isinstance(m, FusedRMSNorm) for m in (layer.input_layernorm, layer.post_attention_layernorm))
        and isinstance(mlp.act_fn, RowwiseActivation)
        and type(mlp.act_fn.activation).__name__ in ("SiLU", "SiLUActivation")
    )
