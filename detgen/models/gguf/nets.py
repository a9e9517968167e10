"""Gated delta nets and short convolutions in GGUF files: their configurations, and the changes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.gguf import states as states
from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said
from detgen.models.gguf.dense import rotary
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
DELTA_NAMES: states.Names = {"ssm_dt.bias": ("linear_attn.dt_bias", None)}
_JOINED = "linear_attn.in_proj_qkvz.weight"
JOINED_NAMES: states.Names = {"attn_qkv.weight": (_JOINED, 0), "attn_gate.weight": (_JOINED, 1)}


def _delta_nets(of: Said, header: Header) -> dict[str, Any]:
    """Return what all models of gated delta nets share; layers that draft are left out."""
    each = of.take("full_attention_interval", int, 4)
    nets = [(i + 1) % each != 0 for i in range(of.layers)]
    if of.says("attention.recurrent_layers"):
        nets = of.each("attention.recurrent_layers", bool)
    of.leave_out_foreseeing()
    whole = states.whole_of(of, header)
    heads, sizes = states.heads_of(of, whole["hidden_size"]), _net_sizes(of)
    return {
        **whole,
        **heads,
        **sizes,
        "num_hidden_layers": of.layers,
        "layer_types": [states.RECURRENT if net else states.ATTENTION for net in nets[: of.layers]],
        "rms_norm_eps": of.number(states.EPSILON),
        "rope_parameters": rotary(of, heads["head_dim"], partly=True),
    }


def _net_sizes(of: Said) -> dict[str, int]:
    """Return the sizes of gated delta nets."""
    heads, inner = of.take("ssm.time_step_rank", int), of.take("ssm.inner_size", int)
    kept = of.take("ssm.group_count", int)
    if min(heads, kept) < 1 or heads % kept:
        raise of.misunderstood("ssm.group_count", kept)
    if inner % heads:
        raise of.misunderstood("ssm.inner_size", inner)
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": kept,
        "linear_value_head_dim": inner // heads,
        "linear_key_head_dim": of.take("ssm.state_size", int),
        "linear_conv_kernel_dim": of.take("ssm.conv_kernel", int),
    }


def _experts(of: Said) -> dict[str, int]:
    """Return the settings of mixtures of experts, with a shared one, in each layer."""
    of.take("feed_forward_length", int, 0)  # of layers without experts, which do not exist
    return {
        "num_experts": of.take("expert_count", int),
        "num_experts_per_tok": of.take("expert_used_count", int),
        "moe_intermediate_size": of.take("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": of.take("expert_shared_feed_forward_length", int),
    }


def qwen35(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Qwen3.5 for text only, so that positions are single numbers."""
    from transformers import Qwen3_5TextConfig

    of.take("rope.dimension_sections", tuple, ())
    return Qwen3_5TextConfig(**_delta_nets(of, header), intermediate_size=of.take("feed_forward_length", int))


def qwen35moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Qwen3.5 with experts, for text only."""
    from transformers import Qwen3_5MoeTextConfig

    of.take("rope.dimension_sections", tuple, ())
    return Qwen3_5MoeTextConfig(**_delta_nets(of, header), **_experts(of))


def qwen3next(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Qwen3-Next, all of whose layers have experts."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**_delta_nets(of, header), **_experts(of))


def lfm2moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of LFM2 with experts, whose routers' corrections and sums are always the same."""
    from transformers import Lfm2MoeConfig

    whole, kept = states.whole_of(of, header), states.heads_of_layers(of)
    heads = of.take("attention.head_count", int)
    of.agree("expert_gating_func", 2)  # the sigmoid
    return Lfm2MoeConfig(
        **whole,
        num_hidden_layers=of.layers,
        layer_types=[states.ATTENTION if heads else "conv" for heads in kept],
        num_attention_heads=heads,
        num_key_value_heads=max(kept),
        intermediate_size=of.take("feed_forward_length", int),
        num_dense_layers=of.take("leading_dense_block_count", int, 0),
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        moe_intermediate_size=of.take("expert_feed_forward_length", int),
        conv_L_cache=of.take("shortconv.l_cache", int),
        norm_eps=of.number(states.EPSILON),
        rope_parameters=rotary(of, whole["hidden_size"] // heads),
    )


def nets(config: Any) -> Mapping[str, Change]:
    """Return the changes of Qwen3-Next's tensors; its checkpoints group rows by key head."""
    keys, share = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [share * config.linear_value_head_dim] * 2
    ends = np.cumsum([keys * size for size in sizes])
    parts = [np.arange(end - keys * size, end).reshape(keys, -1) for end, size in zip(ends, sizes, strict=True)]
    return {
        **{f"{name}.weight": Change(by="less one") for name in (*_NORMS, "output_norm")},
        "ssm_a": Change(by="logarithm"),
        "ssm_conv1d.weight": Change(by="in rows of one"),
        "ffn_gate_inp_shexp.weight": Change(by="in one row"),  # llama-quantize does not write it so
        _JOINED: Change(np.concatenate(parts, 1).ravel()),
    }


def tiled_nets(config: Any) -> Mapping[str, Change]:
    """Return the changes of Qwen3.5's tensors: files have the first value head of each key head, then the second."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    heads = np.arange(values).reshape(-1, keys).T.ravel()
    rows = (heads[:, None] * size + np.arange(size)).ravel()
    behind = np.concatenate([np.arange(first), first + rows])
    plain = {name: change for name, change in nets(config).items() if name != _JOINED}
    return plain | {
        "attn_qkv.weight": Change(behind),
        "ssm_conv1d.weight": Change(behind, by="in rows of one"),
        "attn_gate.weight": Change(rows),
        **{f"ssm_{name}": Change(heads) for name in ("alpha.weight", "beta.weight", "dt.bias")},
        "ssm_a": Change(heads, by="logarithm"),
        "ssm_out.weight": Change(columns=rows),
    }


CONVOLUTION_NAMES: states.Names = {"exp_probs_b.bias": ("feed_forward.expert_bias", None)}


def convolutions(_: Any) -> Mapping[str, Change]:
    """Return the changes of LFM2's tensors."""
    return {"shortconv.conv.weight": Change(by="in rows of one")}
