"""Mambas, alone or with attention, in GGUF files: their configurations, and the changes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said, rows_of
from detgen.models.gguf.dense import rotary
from detgen.models.gguf.header import Header
from detgen.models.gguf.scans import scans
from detgen.models.gguf.states import (
    ATTENTION,
    EPSILON,
    RECURRENT,
    Names,
    alone_of,
    has,
    heads_of,
    heads_of_layers,
    whole_of,
    wider_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Configurations' names of: heads, their size, groups, entries of a state, taps, biases of convolutions and of inputs.
_PREFIXED = ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias")
_OF_HYBRIDS = tuple(f"mamba_{name}" for name in _PREFIXED)
_OF_NEMOTRON = (
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    *("use_conv_bias", "mamba_proj_bias"),
)
_OF_MAMBA = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias")

_HALVES = "shared_mlp.input_linear.weight"
GRANITE_NAMES: Names = {
    "ssm_dt.bias": ("mamba.dt_bias", None),
    "ffn_gate_inp.weight": ("block_sparse_moe.router.weight", None),
    # Of experts that all tokens use; in models without other experts, they have other names.
    **{f"ffn_gate{all_have}.weight": (_HALVES, 0) for all_have in ("_shexp", "")},
    **{f"ffn_up{all_have}.weight": (_HALVES, 1) for all_have in ("_shexp", "")},
    "ffn_down.weight": ("shared_mlp.output_linear.weight", None),
}
FALCON_NAMES: Names = {
    "ssm_dt.bias": ("mamba.dt_bias", None),
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), ("pre_ff_layernorm.weight", None)),
}
MAMBA_2_NAMES: Names = {"ssm_dt.bias": ("mixer.dt_bias", None)}
_IN_MIXERS = {
    **{"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "exp_probs_b.bias": "gate.e_score_correction_bias"},
    **{"ffn_up_exps.weight": "experts.up_proj", "ffn_down_exps.weight": "experts.down_proj"},
    **{
        f"{tensor}.{kind}": f"{module}.{kind}"
        for tensor, module in {
            **{"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"},
            **{"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"},
            **{"ffn_up": "up_proj", "ffn_down": "down_proj", "ffn_gate_inp": "gate"},
            **{"ffn_up_shexp": "shared_experts.up_proj", "ffn_down_shexp": "shared_experts.down_proj"},
        }.items()
        for kind in ("weight", "bias")
    },
}
NEMOTRON_NAMES: Names = {tensor: (f"mixer.{name}", None) for tensor, name in _IN_MIXERS.items()}


def mixers(config: Any) -> Mapping[str, Change]:
    """Return the changes of Mamba-2's tensors, whose heads and groups have dimensions of their own."""
    flat = {name: Change(by="flat") for name in ("ssm_d", "ssm_norm.weight")}
    return {**scans(config), **flat, "ssm_a": Change(by="flat logarithm")}


def _kinds(kept: Sequence[int]) -> list[str]:
    """Return the kinds of layers by their numbers of key heads."""
    return [ATTENTION if heads else RECURRENT for heads in kept]


def _mixers(of: Said, header: Header, names: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Return the width of Mamba-2 mixers, and their sizes and biases under these names."""
    heads, inner, groups = (of.take(f"ssm.{name}", int) for name in ("time_step_rank", "inner_size", "group_count"))
    if min(heads, groups) < 1 or heads % groups:
        raise of.misunderstood("ssm.group_count", groups)
    if inner % heads:
        raise of.misunderstood("ssm.inner_size", inner)
    sizes = heads, inner // heads, groups, of.take("ssm.state_size", int), of.take("ssm.conv_kernel", int)
    biased = has(header, "ssm_conv1d.bias"), has(header, "ssm_in.bias")
    return inner, dict(zip(names, (*sizes, *biased), strict=True))


def granitehybrid(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Granite 4 with Mamba-2; Bamba's files have no attention factor and are refused."""
    from transformers import GraniteMoeHybridConfig

    whole, kept = whole_of(of, header), heads_of_layers(of)
    heads, (inner, sizes) = of.take("attention.head_count", int), _mixers(of, header, _OF_HYBRIDS)
    rotated = of.take("rope.scaling.finetuned", bool, True)
    return GraniteMoeHybridConfig(
        **whole,
        **sizes,
        num_hidden_layers=of.layers,
        layer_types=_kinds(kept),
        num_attention_heads=heads,
        num_key_value_heads=max(kept),
        attention_bias=has(header, "attn_q.bias"),
        attention_multiplier=of.number("attention.scale"),
        embedding_multiplier=of.number("embedding_scale", 1.0),
        residual_multiplier=of.number("residual_scale", 1.0),
        logits_scaling=of.number("logit_scale", 1.0),
        rope_parameters=rotary(of, whole["hidden_size"] // heads),
        position_embedding_type="rope" if rotated else None,
        rms_norm_eps=of.number(EPSILON),
        intermediate_size=of.take("feed_forward_length", int),
        num_local_experts=of.take("expert_count", int, 0),
        num_experts_per_tok=of.take("expert_used_count", int, 0),
        shared_intermediate_size=of.take("expert_shared_feed_forward_length", int),
        mamba_expand=wider_of(of, inner, whole["hidden_size"]),
    )


def falcon_h1(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Falcon-H1; files have its checkpoints' factors multiplied into the weights."""
    from transformers import FalconH1Config

    rows_of(header, "output.weight")  # has another factor in it than the embedding
    whole, (inner, sizes) = whole_of(of, header), _mixers(of, header, _OF_HYBRIDS)
    heads = heads_of(of, whole["hidden_size"])
    return FalconH1Config(
        **whole,
        **heads,
        **sizes,
        num_hidden_layers=of.layers,
        intermediate_size=of.take("feed_forward_length", int),
        rope_parameters=rotary(of, heads["head_dim"]),
        rms_norm_eps=of.number(EPSILON),
        mamba_d_ssm=inner,
        mamba_rms_norm=has(header, "ssm_norm.weight"),
        mamba_norm_before_gate=False,
        attention_bias=has(header, "attn_q.bias"),
        mlp_bias=has(header, "ffn_gate.bias"),
        projectors_bias=has(header, "ssm_out.bias"),
    )


def nemotron_h(of: Said, header: Header, _path: Path) -> PreTrainedConfig:
    """Return the configuration of Nemotron-H: layers are mixers, attention without positions, MLPs or experts."""
    from transformers import NemotronHConfig

    kept, wide = of.each("attention.head_count_kv", int), of.each("feed_forward_length", int)
    of.leave_out_foreseeing()
    experts = has(header, "ffn_gate_inp.weight")
    kinds = {(True, False): ATTENTION, (False, True): "moe" if experts else "mlp", (False, False): RECURRENT}
    found = [(heads > 0, width > 0) for heads, width in zip(kept, wide, strict=True)][: of.layers]
    if len({*kept[: of.layers]} - {0}) != 1 or len({*wide[: of.layers]} - {0}) > 1 or (True, True) in found:
        raise of.misunderstood("attention.head_count_kv", tuple(kept))
    whole, (_, sizes) = whole_of(of, header), _mixers(of, header, _OF_NEMOTRON)
    heads = heads_of(of, whole["hidden_size"], max(kept))
    if of.take("rope.scaling.finetuned", bool, False):
        raise of.misunderstood("rope.scaling.finetuned", True)
    for name, kind in (("rope.dimension_count", 0), ("rope.freq_base", 0.0)):
        of.take(name, type(kind), kind)  # Nemotron-H has no rotary embedding
    epsilons = [of.number(name) for name in (EPSILON, "attention.layer_norm_epsilon") if of.says(name)]
    if len({*epsilons}) != 1:
        raise of.misunderstood(EPSILON, epsilons)
    return NemotronHConfig(
        **whole,
        **heads,
        **sizes,
        **_mixture(of, has_experts=experts),
        layers_block_type=[kinds[one] for one in found],
        intermediate_size=max(wide),
        layer_norm_epsilon=epsilons[0],
        attention_bias=has(header, "attn_q.bias"),
        mlp_bias=has(header, "ffn_up.bias"),
        use_bias=has(header, "ssm_out.bias"),
    )


def _mixture(of: Said, *, has_experts: bool) -> dict[str, Any]:
    """Return the settings of Nemotron-H's experts; files may have them without having experts."""
    found = {
        "n_routed_experts": of.take("expert_count", int, 0),
        "num_experts_per_tok": of.take("expert_used_count", int, 0),
        "moe_intermediate_size": of.take("expert_feed_forward_length", int, 0),
        "moe_shared_expert_intermediate_size": of.take("expert_shared_feed_forward_length", int, 0),
        "n_shared_experts": of.take("expert_shared_count", int, 1),
        "norm_topk_prob": of.take("expert_weights_norm", bool, True),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "n_group": of.take("expert_group_count", int, 1),
        "topk_group": of.take("expert_group_used_count", int, 1),
    }
    return found if has_experts else {}


def mamba2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Mamba-2 without attention."""
    from transformers import Mamba2Config

    (inner, sizes), scan = _mixers(of, header, _OF_MAMBA), alone_of(of, header)
    return Mamba2Config(**scan, **sizes, expand=wider_of(of, inner, scan["hidden_size"]))
