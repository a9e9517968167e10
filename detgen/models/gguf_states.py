"""Families with states in GGUF files: what their files say, and which rows, columns and numbers they have otherwise.

A recurrent layer's rate is the file's -e^x, where x is what a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.gguf_changes import Change
from detgen.models.gguf_configs import Said, rows_of
from detgen.models.gguf_header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
Names = dict[str, tuple[str, int | None]]
DELTA_NAMES: Names = {"ssm_dt.bias": ("linear_attn.dt_bias", None)}
_JOINED = "linear_attn.in_proj_qkvz.weight"
JOINED_NAMES: Names = {"attn_qkv.weight": (_JOINED, 0), "attn_gate.weight": (_JOINED, 1)}


def _whole(of: Said, header: Header) -> dict[str, Any]:
    """Sizes that all have."""
    vocabulary = rows_of(header, "token_embd.weight")
    of.agree("vocab_size", vocabulary)
    return {
        "vocab_size": vocabulary,
        "hidden_size": of.take("embedding_length", int),
        "max_position_embeddings": of.take("context_length", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _heads(of: Said, hidden: int) -> dict[str, int]:
    """Of attentions that are alike in all layers that have one."""
    heads = of.take("attention.head_count", int)
    size = of.take("attention.key_length", int, hidden // heads)
    of.agree("attention.value_length", size)
    kept = of.take("attention.head_count_kv", int)
    return {"num_attention_heads": heads, "num_key_value_heads": kept, "head_dim": size}


def _rotation(of: Said, size: int) -> dict[str, Any]:
    """A rotary embedding of so many entries of a head, or of some of them."""
    turned = of.take("rope.dimension_count", int, size)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": of.take("rope.freq_base", float)}
    if turned != size:
        found["partial_rotary_factor"] = (turned + 0.5) / size  # so that what is rounded down is the number that it was
    kind = of.take("rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise of.misunderstood("rope.scaling.type", kind)
    if kind != "none":
        found |= {"rope_type": kind, "factor": of.take("rope.scaling.factor", float)}
    if kind == "yarn":
        found["original_max_position_embeddings"] = of.take("rope.scaling.original_context_length", int)
        found["beta_fast"] = of.take("rope.scaling.yarn_beta_fast", float, 32.0)
        found["beta_slow"] = of.take("rope.scaling.yarn_beta_slow", float, 1.0)
    return found


def _delta_nets(of: Said, header: Header) -> dict[str, Any]:
    """What all models of gated delta nets have; layers that draft are left out."""
    own = of.layers - of.take("nextn_predict_layers", int, 0)
    each = of.take("full_attention_interval", int, 4)
    nets = [(i + 1) % each != 0 for i in range(own)]
    if "attention.recurrent_layers" in of:
        nets = of.each("attention.recurrent_layers", bool)[:own]
    whole = _whole(of, header)
    heads, sizes = _heads(of, whole["hidden_size"]), _net_sizes(of)
    return {
        **whole,
        **heads,
        **sizes,
        "num_hidden_layers": own,
        "layer_types": ["linear_attention" if net else "full_attention" for net in nets],
        "rms_norm_eps": of.take("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rotation(of, heads["head_dim"]),
    }


def _net_sizes(of: Said) -> dict[str, int]:
    """Of gated delta nets."""
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
    """Of mixtures of experts, one of them shared, in each layer."""
    of.take("feed_forward_length", int, 0)  # of layers without experts, of which there are none
    return {
        "num_experts": of.take("expert_count", int),
        "num_experts_per_tok": of.take("expert_used_count", int),
        "moe_intermediate_size": of.take("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": of.take("expert_shared_feed_forward_length", int),
    }


def qwen35(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Of Qwen3.5, text alone, where positions are one number."""
    from transformers import Qwen3_5TextConfig

    of.take("rope.dimension_sections", tuple, ())
    return Qwen3_5TextConfig(**_delta_nets(of, header), intermediate_size=of.take("feed_forward_length", int))


def qwen35moe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Of Qwen3.5 with experts, likewise."""
    from transformers import Qwen3_5MoeTextConfig

    of.take("rope.dimension_sections", tuple, ())
    return Qwen3_5MoeTextConfig(**_delta_nets(of, header), **_experts(of))


def qwen3next(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Of Qwen3-Next, all of whose layers have experts."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**_delta_nets(of, header), **_experts(of))


def nets(config: Any) -> Mapping[str, Change]:
    """What becomes of the tensors of Qwen3-Next, in whose checkpoints rows go by key heads."""
    keys, share = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [share * config.linear_value_head_dim] * 2
    ends = np.cumsum([keys * size for size in sizes])
    parts = [np.arange(end - keys * size, end).reshape(keys, -1) for end, size in zip(ends, sizes, strict=True)]
    return {
        **{f"{name}.weight": Change(by="less one") for name in (*_NORMS, "output_norm")},
        "ssm_a": Change(by="logarithms"),
        "ssm_conv1d.weight": Change(by="taps"),
        _JOINED: Change(np.concatenate(parts, 1).ravel()),
    }


def tiled_nets(config: Any) -> Mapping[str, Change]:
    """What becomes of those of Qwen3.5, which have one value head of each key head, then the next ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    heads = np.arange(values).reshape(-1, keys).T.ravel()
    rows = (heads[:, None] * size + np.arange(size)).ravel()
    behind = np.concatenate([np.arange(first), first + rows])
    plain = {name: change for name, change in nets(config).items() if name != _JOINED}
    return plain | {
        "attn_qkv.weight": Change(behind),
        "ssm_conv1d.weight": Change(behind, by="taps"),
        "attn_gate.weight": Change(rows),
        **{f"ssm_{name}": Change(heads) for name in ("alpha.weight", "beta.weight", "dt.bias")},
        "ssm_a": Change(heads, by="logarithms"),
        "ssm_out.weight": Change(columns=rows),
    }
