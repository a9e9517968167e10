"""The first Mamba, alone or in Jamba, in GGUF files: their configurations, and the changes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said
from detgen.models.gguf.header import Header
from detgen.models.gguf.states import EPSILON, alone_of, has, heads_of_layers, whole_of, wider_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def scans(_: Any) -> Mapping[str, Change]:
    """Return the changes of the first Mamba's tensors."""
    return {"ssm_a": Change(by="logarithm"), "ssm_conv1d.weight": Change(by="in rows of one")}


def mamba(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the first Mamba, or of Falcon Mamba, which norms the inputs of the scan."""
    from transformers import FalconMambaConfig, MambaConfig

    scan = alone_of(of, header)
    made = FalconMambaConfig if of.take("ssm.dt_b_c_rms", bool, False) else MambaConfig
    return made(
        **scan,
        expand=wider_of(of, of.take("ssm.inner_size", int), scan["hidden_size"]),
        state_size=of.take("ssm.state_size", int),
        conv_kernel=of.take("ssm.conv_kernel", int),
        time_step_rank=of.take("ssm.time_step_rank", int),
        use_bias=has(header, "ssm_in.bias"),
        use_conv_bias=has(header, "ssm_conv1d.bias"),
    )


def jamba(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Jamba: layers with attention, without positions, and with experts at intervals."""
    from transformers import JambaConfig

    whole, kept = whole_of(of, header), heads_of_layers(of)
    every, first = _interval([heads > 0 for heads in kept], of)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in header.tensors for i in range(of.layers)]
    period, offset = _interval(routed, of)
    return JambaConfig(
        **whole,
        num_hidden_layers=of.layers,
        num_attention_heads=of.take("attention.head_count", int),
        num_key_value_heads=max(kept),
        attn_layer_period=every,
        attn_layer_offset=first,
        expert_layer_period=period,
        expert_layer_offset=offset,
        intermediate_size=of.take("feed_forward_length", int),
        rms_norm_eps=of.number(EPSILON),
        num_experts=of.take("expert_count", int, 1),
        num_experts_per_tok=of.take("expert_used_count", int, 1),
        mamba_expand=wider_of(of, of.take("ssm.inner_size", int), whole["hidden_size"]),
        mamba_d_state=of.take("ssm.state_size", int),
        mamba_d_conv=of.take("ssm.conv_kernel", int),
        mamba_dt_rank=of.take("ssm.time_step_rank", int),
        mamba_conv_bias=has(header, "ssm_conv1d.bias"),
        mamba_proj_bias=has(header, "ssm_in.bias"),
    )


def _interval(there: Sequence[bool], of: Said) -> tuple[int, int]:
    """Return the interval of layers that have something, and the first of them.

    Raises:
        ValueError: if there is no fixed interval.
    """
    first = there.index(True) if any(there) else len(there)
    for period in range(first + 1, len(there) + 2):
        if list(there) == [i % period == first for i in range(len(there))]:
            return period, first
    raise of.misunderstood("block_count", len(there))
