"""A Llama decoder in as few operators as possible.

At the row counts of decoding, transformers' forward spends more time between its operators than in them. This decoder
does the same arithmetic with fewer: query, key and value in one product, norm weights folded into the products after
them, the rotation as one complex product, rows without a batch axis, modules called by their `forward`, since calling
a module costs as much as a small operator. It replaces the decoders named in `_PLAIN`, in float32 or bfloat16 on the
CPU; in bfloat16, norms, rotation and residuals stay in float32. The probe compares its logits with those of the model's
own forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from detgen.kernels.activation import rowwise
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.linear import PrepackedLinear, can_prepack
from detgen.passes.exchange import Exchange

# Attention of the pass in progress: called with layer, q, k, v and the layer's traits; see `Forward.attend`.
AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionTraits], torch.Tensor]

# Decoders that consist of: embedding; layers of norm, rotary attention, residual, norm, gated SiLU, residual; norm;
# output layer.
_PLAIN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class _Norm:
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), in float32.

    Args:
        size: entries of a row.
        epsilon: added to the mean square.
        weight: [size], or [heads, size] for one per head; None for none.
    """

    def __init__(self, size: int, epsilon: float, weight: torch.Tensor | None = None) -> None:
        # x / sqrt(mean(x ** 2) + e) is sqrt(size) * x / sqrt(sum(x ** 2) + size * e).
        self._floor = size * epsilon
        self._weight = None if weight is None else weight.float() * math.sqrt(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., size] -> [..., size]; without a weight, 1 / sqrt(size) of the norm."""
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out = x * length.mul_(length).add_(self._floor).rsqrt_()
        return out if self._weight is None else out.mul_(self._weight)


class _NormedLinear(PrepackedLinear):
    """A norm and the linear layers that read its result, in one product.

    Args:
        norm: the norm. In float32 its weight is folded into the product's; bfloat16 would round once more.
        linears: the linear layers.
        order: order of the outputs; None keeps it.
    """

    def __init__(self, norm: Any, linears: list[Any], order: torch.Tensor | None = None) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        size, folded = weight.shape[1], weight.dtype == torch.float32
        if folded:
            weight = weight * (norm.weight * math.sqrt(size))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        super().__init__(weight, bias)
        self._norm = _Norm(size, norm.variance_epsilon, None if folded else norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in_features] -> [rows, out_features]."""
        return super().forward(self._norm(x).to(self.dtype))


def paired(heads: torch.Tensor) -> torch.Tensor:
    """[..., head_size] with entries i and i + head_size / 2 next to each other."""
    pairs: torch.Tensor = heads.unflatten(-1, (2, -1)).transpose(-1, -2)
    return pairs.flatten(-2)


def _turn(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """float32 [rows, heads, head_size] with adjacent entries as pairs, rotated by complex [rows, 1, head_size / 2]."""
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)


class LeanDecoderLayer(nn.Module):
    """One layer.

    Args:
        layer: the transformers layer.
        attend: attention of the pass in progress.
        traits: the layer's attention traits.
    """

    def __init__(self, layer: Any, attend: AttendRows, traits: AttentionTraits) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.head_size: int = attention.head_dim
        self.kv_heads: int = attention.k_proj.out_features // self.head_size
        self.traits = traits
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        turned = (attention.q_proj.out_features // self.head_size + self.kv_heads) * self.head_size
        outputs = turned + attention.v_proj.out_features
        # transformers rotates entry i of a head with entry i + head_size / 2; here the two are adjacent.
        order = torch.arange(outputs)
        order[:turned] = paired(order[:turned].view(-1, self.head_size)).reshape(-1)
        self.qkv_proj = _NormedLinear(layer.input_layernorm, projections, order)
        self.o_proj = PrepackedLinear(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up_proj = _NormedLinear(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        self.down_proj = PrepackedLinear(mlp.down_proj.weight, mlp.down_proj.bias)
        self._head_norm = self._norm_of_heads(attention) if hasattr(attention, "q_norm") else None
        self._attend = attend

    def _norm_of_heads(self, attention: Any) -> _Norm:
        """The norms of the query heads and of the key heads, in one."""
        q, k = paired(attention.q_norm.weight), paired(attention.k_norm.weight)
        heads = attention.q_proj.out_features // self.head_size
        weight = torch.cat([q.expand(heads, -1), k.expand(self.kv_heads, -1)])
        return _Norm(self.head_size, attention.q_norm.variance_epsilon, weight)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of all rows, or of the wanted ones; the keys and values of all rows are stored.

        Args:
            hidden: float32 [rows, hidden].
            rotation: complex [rows, 1, head_size / 2].
            wanted: rows, int64 [n]; None for all.

        Returns:
            float32 [rows or n, hidden].
        """
        rows = hidden.shape[0]
        heads = self.qkv_proj.forward(hidden).view(rows, -1, self.head_size)
        turned = heads[:, : -self.kv_heads].float()
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        turned = rowwise(_turn, turned, rotation).to(heads.dtype)
        q, k, v = turned[:, : -self.kv_heads], turned[:, -self.kv_heads :], heads[:, -self.kv_heads :]
        mixed = self._attend(self.index, q, k, v, self.traits).view(rows, -1)
        if wanted is not None:
            hidden, mixed = hidden.index_select(0, wanted), mixed.index_select(0, wanted)
        hidden = hidden + self.o_proj.forward(mixed)
        gate, up = self.gate_up_proj.forward(hidden).chunk(2, dim=-1)
        return hidden + self.down_proj.forward(rowwise(F.silu, gate).mul_(up))


class LeanDecoder(nn.Module):
    """A whole decoder; it takes over the weights of `model`, whose layers and output layer are released.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at a time; it holds no state during a pass.
    """

    concurrent = True
    native = False  # by torch's operators

    def __init__(self, model: Any, attend: AttendRows, traits: Sequence[AttentionTraits]) -> None:
        super().__init__()
        inner = model.model
        self.kind = type(model).__name__
        self.embed_tokens: nn.Module = inner.embed_tokens
        self.layers: Any = nn.ModuleList()
        # Each layer is released before the next is built, so that memory holds at most one of them twice.
        for i in range(len(inner.layers)):
            index = inner.layers[i].self_attn.layer_idx
            self.layers.append(LeanDecoderLayer(inner.layers[i], attend, traits[index]))
            inner.layers[i] = nn.Identity()
        self.lm_head = _NormedLinear(inner.norm, [model.lm_head]) if _has_head(model) else nn.Identity()
        self._frequencies: torch.Tensor = inner.rotary_emb.inv_freq.float()
        self._amplitude: float = inner.rotary_emb.attention_scaling
        model.lm_head = nn.Identity()

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, exchange: Exchange | None = None
    ) -> torch.Tensor:
        """Logits [n, vocabulary] of the rows `wanted`, int64 [n]; ids and positions int64 [rows].

        Without an output layer, the rows' hidden states instead, float32 [n, hidden].
        """
        hidden = self.embed_tokens.forward(ids).float()
        angles = positions[:, None, None] * self._frequencies
        rotation = torch.polar(torch.full_like(angles, self._amplitude), angles)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            if exchange is not None:
                hidden = exchange.at(i, hidden)
            hidden = layer.forward(hidden, rotation, wanted if i == last else None)
        return self.lm_head.forward(hidden)


def lean_decoder(model: Any, attend: AttendRows, traits: Sequence[AttentionTraits]) -> LeanDecoder | None:
    """A lean decoder of a loaded model; None, and the model unchanged, if there is none for its class.

    Args:
        model: a transformers decoder; with the identity for its norm and its output layer, it gives hidden states.
        attend: attention of the pass in progress.
        traits: attention traits of each layer.
    """
    if type(model).__name__ not in _PLAIN or not all(_is_plain(layer) for layer in model.model.layers):
        return None
    if _has_head(model) and not (type(model.lm_head) is nn.Linear and can_prepack(model.lm_head.weight)):
        return None
    rope, head_size = model.model.rotary_emb, model.model.layers[0].self_attn.head_dim
    if rope.rope_type not in _FIXED_ROPE or 2 * len(rope.inv_freq) != head_size:
        return None
    return LeanDecoder(model, attend, traits)


def _has_head(model: Any) -> bool:
    return type(model.lm_head) is not nn.Identity


_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies that do not depend on the positions of a pass


def _is_plain(layer: Any) -> bool:
    """Whether the layer has exactly the parts of a lean one, not quantized, in one dtype that oneDNN supports."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(m) is nn.Linear and can_prepack(m.weight) for m in linears)
        and len({m.weight.dtype for m in linears}) == 1
        and len({m.bias is None for m in linears[:3]}) == 1
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )
