"""Configurations of families with experts, from GGUF files; see `detgen/models/gguf/dense.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said
from detgen.models.gguf.dense import (
    biased,
    granite_settings,
    kinds_of,
    rotary,
    stretched,
    usual,
)
from detgen.models.gguf.header import Header
from detgen.models.gguf.states import Names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SOFTMAX, SIGMOID = 1, 2  # functions of experts' scores
_MAVERICK = 128  # experts of the Llama 4 that does not normalize queries and keys


# Tensors that the tables lack; see `GgufFamily.names`.
ERNIE_NAMES: Names = {"exp_probs_b.bias": ("mlp.gate.moe_statics.e_score_correction_bias", None)}
MINIMAX_NAMES: Names = {"exp_probs_b.bias": ("mlp.e_score_correction_bias", None)}
GRANITE_NAMES: Names = {
    "ffn_gate_inp.weight": ("block_sparse_moe.router.weight", None),
    "ffn_gate_shexp.weight": ("shared_mlp.input_linear.weight", 0),
    "ffn_up_shexp.weight": ("shared_mlp.input_linear.weight", 1),
}


def granitemoe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Granite with experts, with or without a shared one."""
    from transformers import GraniteMoeConfig, GraniteMoeSharedConfig

    made = granite_settings(of, header)
    made["num_local_experts"] = of.take("expert_count", int)
    made["num_experts_per_tok"] = of.take("expert_used_count", int)
    if shared := of.take("expert_shared_feed_forward_length", int, 0):
        return GraniteMoeSharedConfig(**made, shared_intermediate_size=shared)
    return GraniteMoeConfig(**made)


def hunyuan_moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Hunyuan's models with experts, each as wide as the feed-forward of other layers."""
    from transformers import HunYuanMoEV1Config

    made = usual(of, header, stretched) | {"attention_bias": biased(header, "attn_q")}
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        of.agree(name, made["intermediate_size"])
    of.agree("expert_shared_count", 1)
    of.agree("expert_gating_func", SOFTMAX)
    experts, used = of.take("expert_count", int), of.take("expert_used_count", int)
    return HunYuanMoEV1Config(**made, num_experts=experts, moe_topk=used)


def llama4(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Llama 4's text models: windows are chunks; queries grow in layers without RoPE."""
    from transformers import Llama4TextConfig

    made = usual(of, header)
    made["intermediate_size_mlp"] = made["intermediate_size"]
    made["intermediate_size"] = of.take("expert_feed_forward_length", int)
    experts = of.take("expert_count", int)
    return Llama4TextConfig(
        **made,
        num_local_experts=experts,
        num_experts_per_tok=of.take("expert_used_count", int),
        interleave_moe_layer_step=of.take("interleave_moe_layer_step", int),
        use_qk_norm=experts != _MAVERICK,
    )


def olmoe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of OLMoE."""
    from transformers import OlmoeConfig

    experts, used = of.take("expert_count", int), of.take("expert_used_count", int)
    return OlmoeConfig(**usual(of, header, sized=False), num_experts=experts, num_experts_per_tok=used)


def ernie_moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of ERNIE 4.5 with experts."""
    from transformers import Ernie4_5_MoeConfig

    of.take("expert_shared_feed_forward_length", int, 0)  # not the size of the shared experts
    return Ernie4_5_MoeConfig(
        **usual(of, header, sized=False),
        use_bias=biased(header, "attn_q"),
        moe_num_experts=of.take("expert_count", int),
        moe_k=of.take("expert_used_count", int),
        moe_intermediate_size=of.take("expert_feed_forward_length", int),
        moe_num_shared_experts=of.take("expert_shared_count", int, 0),
        moe_layer_start_index=of.take("leading_dense_block_count", int),
        moe_layer_interval=of.take("interleave_moe_layer_step", int),
    )


def corrections(_: Any) -> Mapping[str, Change]:
    """Return the change of the corrections of ERNIE's scores, which are a row for one group in the model."""
    return {"exp_probs_b.bias": Change(by="in one row")}


def minimax_m2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of MiniMax M2."""
    from transformers import MiniMaxM2Config

    of.agree("expert_gating_func", SIGMOID)
    made = usual(of, header, partial(rotary, partly=True))
    of.agree("expert_feed_forward_length", made["intermediate_size"])
    experts, used = of.take("expert_count", int), of.take("expert_used_count", int)
    return MiniMaxM2Config(**made, num_local_experts=experts, num_experts_per_tok=used)


def mellum(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Mellum 2, whose layers with windows have an unstretched rotary embedding."""
    from transformers import MellumConfig

    made = usual(of, header)
    rope = made.pop("rope_parameters")
    own = {"rope_type": "default", "rope_theta": of.number("rope.freq_base_swa", rope["rope_theta"])}
    window = of.take("attention.sliding_window", int, 0)
    windows = of.each("attention.sliding_window_pattern", bool) if window else [False] * of.layers
    return MellumConfig(
        **made,
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        moe_intermediate_size=of.take("expert_feed_forward_length", int),
        sliding_window=window or None,
        layer_types=kinds_of(windows),
        rope_parameters={"full_attention": rope, "sliding_attention": own},
    )
