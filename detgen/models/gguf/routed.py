"""Configurations of families with routed and shared experts, from GGUF files.

See `detgen/models/gguf/dense.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.models.gguf.configs import Said
from detgen.models.gguf.dense import EVERY, RMS, biased, common, kinds_of, rotary, usual
from detgen.models.gguf.header import Header
from detgen.models.gguf.mixtures import SIGMOID, SOFTMAX
from detgen.models.gguf.states import Names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GROWING = 0.1  # how much Mistral 4's queries grow
# Groups of experts, and how many of them are used, in DeepSeek V2 and V3, by the number of experts: older files omit
# them.
_GROUPS = {160: (8, 3), 256: (8, 4)}

# Tensors that the tables lack; see `GgufFamily.names`.
CORRECTED: Names = {"exp_probs_b.bias": ("mlp.gate.e_score_correction_bias", None)}
LATENT: Names = {
    "attn_k_b.weight": ("self_attn.kv_b_proj.weight", 0),
    "attn_v_b.weight": ("self_attn.kv_b_proj.weight", 1),
}
AFMOE_NAMES: Names = {"exp_probs_b.bias": ("mlp.expert_bias", None)}
HY_NAMES: Names = {"exp_probs_b": ("mlp.e_score_correction_bias", None)}


def _routed(of: Said, *, kind: int) -> dict[str, Any]:
    """Return the settings of experts like DeepSeek's.

    Args:
        of: the file's settings.
        kind: function of scores, which the file may give.
    """
    of.agree("expert_gating_func", kind)
    return {
        "n_routed_experts": of.take("expert_count", int),
        "num_experts_per_tok": of.take("expert_used_count", int),
        "moe_intermediate_size": of.take("expert_feed_forward_length", int),
        "n_shared_experts": of.take("expert_shared_count", int),
        "first_k_dense_replace": of.take("leading_dense_block_count", int, 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "norm_topk_prob": of.take("expert_weights_norm", bool, False),
        "n_group": of.take("expert_group_count", int, 1),
        "topk_group": of.take("expert_group_used_count", int, 1),
    }


def glm4moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of GLM-4.5 and 4.6, without layers that predict further tokens."""
    from transformers import Glm4MoeConfig

    of.leave_out_foreseeing()
    return Glm4MoeConfig(
        **usual(of, header, partial(rotary, partly=True)),
        **_routed(of, kind=SIGMOID),
        attention_bias=biased(header, "attn_q"),
        use_qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
    )


def deepseek2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of DeepSeek V2 or V3, or of Kimi K2 and GLM-4.7 Flash, which are like V3."""
    from transformers import DeepseekV2Config, DeepseekV3Config

    of.leave_out_foreseeing()
    grouped = of.says("expert_group_count")
    corrected = any(name.endswith("exp_probs_b.bias") for name in header.tensors)
    made = _latent(of, header, kind=SIGMOID if corrected else SOFTMAX)
    if not grouped and (groups := _GROUPS.get(made["n_routed_experts"])):
        made |= dict(zip(("n_group", "topk_group"), groups, strict=True))
    if corrected:
        return DeepseekV3Config(**made)
    if made["norm_topk_prob"]:  # transformers cannot normalize these
        raise of.misunderstood("expert_weights_norm", made["norm_topk_prob"])
    return DeepseekV2Config(**made, topk_method="greedy" if made["n_group"] == 1 else "group_limited_greedy")


def mistral4(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Mistral 4, whose queries grow with position; files do not say how much."""
    from transformers import Mistral4Config

    made = _latent(of, header, kind=SOFTMAX)
    made["rope_parameters"]["llama_4_scaling_beta"] = _GROWING
    return Mistral4Config(**made)


def _latent(of: Said, header: Header, *, kind: int) -> dict[str, Any]:
    """Return the settings of heads like DeepSeek's, which files store in two ways, and of experts.

    Args:
        of: the file's settings.
        header: the file's header.
        kind: function of experts' scores.
    """
    made = common(of, header)
    heads, apart = made["num_attention_heads"], made["num_key_value_heads"] == 1
    rank, turned = of.take("attention.kv_lora_rank", int), of.take("rope.dimension_count", int)
    suffix = "_mla" if apart else ""
    size, values = (of.take(f"attention.{name}_length{suffix}", int) for name in ("key", "value"))
    if apart:  # stored as a single key head whose values are a part of it
        of.agree("attention.key_length", rank + turned)
        of.agree("attention.value_length", rank)
    elif made["num_key_value_heads"] != heads:
        raise of.misunderstood("attention.head_count_kv", made["num_key_value_heads"])
    return {
        **made,
        **_routed(of, kind=kind),
        "num_key_value_heads": heads,
        "intermediate_size": of.take("feed_forward_length", int),
        "rms_norm_eps": of.number(RMS),
        "q_lora_rank": of.take("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": values,
        "rope_parameters": rotary(of, turned, multiplier=10.0),
        "attention_bias": biased(header, "attn_kv_a_mqa"),
    }


def dots1(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of dots.llm1."""
    from transformers import Dots1Config

    return Dots1Config(**usual(of, header), **_routed(of, kind=SIGMOID), attention_bias=biased(header, "attn_q"))


def afmoe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of AFM with experts, such as Trinity; every fourth layer has full attention."""
    from transformers import AfmoeConfig

    of.agree("expert_gating_func", SIGMOID)
    if not of.take("expert_weights_norm", bool, True):
        raise of.misunderstood("expert_weights_norm", False)
    return AfmoeConfig(
        **usual(of, header),
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        num_shared_experts=of.take("expert_shared_count", int, 0),
        moe_intermediate_size=of.take("expert_feed_forward_length", int),
        num_dense_layers=of.take("leading_dense_block_count", int, 0),
        route_scale=of.number("expert_weights_scale", 1.0),
        sliding_window=of.take("attention.sliding_window", int),
        global_attn_every_n_layers=EVERY,
        mup_enabled=True,
    )


def exaone_moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of K-EXAONE, without layers that predict further tokens."""
    from transformers import ExaoneMoeConfig

    of.leave_out_foreseeing()
    experts = _routed(of, kind=SIGMOID)
    shared = experts.pop("n_shared_experts")
    of.agree("expert_shared_feed_forward_length", shared * experts["moe_intermediate_size"])
    return ExaoneMoeConfig(
        **usual(of, header),
        **experts,
        num_experts=experts.pop("n_routed_experts"),
        num_shared_experts=shared,
        sliding_window=of.take("attention.sliding_window", int),
        layer_types=kinds_of(of.each("attention.sliding_window_pattern", bool)),
    )


def _shared(of: Said, inner: int) -> int:
    """Return the number of shared experts, each as wide as the others; a file gives their total width."""
    together = of.take("expert_shared_feed_forward_length", int, 0)
    count = of.take("expert_shared_count", int, together // inner)
    if together != count * inner:
        raise of.misunderstood("expert_shared_feed_forward_length", together)
    return count


def hy_v3(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Hy3, without layers that predict further tokens."""
    from transformers import HYV3Config

    of.leave_out_foreseeing()
    of.agree("expert_gating_func", SIGMOID)
    if not of.take("expert_weights_norm", bool, True):
        raise of.misunderstood("expert_weights_norm", False)
    inner = of.take("expert_feed_forward_length", int)
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in header.tensors for i in range(of.layers)]
    return HYV3Config(
        **usual(of, header),
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        num_shared_experts=_shared(of, inner),
        moe_intermediate_size=inner,
        router_scaling_factor=of.number("expert_weights_scale"),
        mlp_layer_types=["sparse" if there else "dense" for there in sparse],
    )


def cohere2_moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of North Mini Code, without layers that predict further tokens."""
    from transformers import Cohere2MoeConfig

    of.leave_out_foreseeing()
    made = usual(of, header, norms="layer_norm_eps")
    inner, dense = of.take("expert_feed_forward_length", int), of.take("leading_dense_block_count", int)
    made |= {"intermediate_size": inner, "prefix_dense_intermediate_size": made["intermediate_size"]}
    return Cohere2MoeConfig(
        **made,
        logit_scale=of.number("logit_scale"),
        sliding_window=of.take("attention.sliding_window", int),
        layer_types=kinds_of(of.each("attention.sliding_window_pattern", bool)),
        mlp_layer_types=["dense" if i < dense else "sparse" for i in range(of.layers)],
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        num_shared_experts=_shared(of, inner),
        norm_topk_prob=of.take("expert_weights_norm", bool),
        expert_selection_fn={SOFTMAX: "softmax", SIGMOID: "sigmoid"}[of.take("expert_gating_func", int)],
    )
