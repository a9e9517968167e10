"""Configurations of families that LongRoPE may stretch, Phi and MiniCPM; see `detgen/models/gguf/dense.py`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.gguf.configs import LONG_FACTORS, SHORT_FACTORS, Said, numbers_of
from detgen.models.gguf.dense import RMS, biased, common, rotary, usual
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BASE = 256  # hidden size at which MiniCPM's logits are not scaled, unless a file says otherwise
_EMBEDDED, _DEEP = 12.0, 1.4  # factors of its embeddings and of what layers add, the latter over sqrt(layers); likewise
_AMPLITUDE = 1.243163121016122  # factor of Phi-MoE's rotary embedding, from its checkpoints, whatever a file says


def _factors(of: Said, header: Header, path: Path) -> dict[str, list[float]]:
    """Return LongRoPE's factors by their names in configurations; none if a file has none.

    Raises:
        ValueError: if one of the lists is missing, or the file asks for another kind of scaling.
    """
    if LONG_FACTORS not in header.tensors:
        return {}
    of.agree("rope.scaling.type", "longrope")
    each = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    return {key: numbers_of(header, path, name).tolist() for key, name in each.items()}


def _stretch(rope: dict[str, Any], factors: dict[str, list[float]], turned: int, original: int) -> dict[str, Any]:
    """Return a rotary embedding stretched by factors, if there are any.

    Args:
        rope: the rotary embedding without them.
        factors: factors of frequencies.
        turned: number of entries of a head that rotate.
        original: number of positions before the stretch.

    Raises:
        ValueError: if there are not as many factors as frequencies.
    """
    for key, numbers in factors.items():
        if len(numbers) != turned // 2:
            raise ValueError(
                f"the weights do not fit its settings: {len(numbers)} of {key} for {turned // 2} frequencies"
            )
    if not factors:
        return rope
    return rope | factors | {"rope_type": "longrope", "original_max_position_embeddings": original}


def _phi(of: Said, header: Header, path: Path) -> tuple[dict[str, Any], int, float | None]:
    """Return what Phi-3 and Phi-MoE share.

    Returns:
        Settings; positions before the stretch; and LongRoPE's amplitude, None if it is as in its paper.
    """
    factors = _factors(of, header, path)
    made = usual(of, header, partial(rotary, partly=True), sized=False)
    made["sliding_window"] = of.take("attention.sliding_window", int, 0) or None
    positions, rope = made["max_position_embeddings"], made["rope_parameters"]
    original = of.take("rope.scaling.original_context_length", int, positions)
    size = made["hidden_size"] // made["num_attention_heads"]
    made["rope_parameters"] = _stretch(rope, factors, int(size * rope["partial_rotary_factor"]), original)
    if not factors:
        return made, original, None
    stretch = positions / original
    paper = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    said = of.number("rope.scaling.attn_factor", paper)
    return made, original, None if np.float32(said) == np.float32(paper) else said


def phi3(of: Said, header: Header, path: Path) -> PreTrainedConfig:
    """Return the configuration of Phi-3, 3.5 and 4."""
    from transformers import Phi3Config

    made, original, factor = _phi(of, header, path)
    rope = made["rope_parameters"]
    if factor is not None:
        rope["attention_factor"] = factor
    if rope["rope_type"] == "linear":  # which the configuration would refuse
        made["rope_parameters"] = {"rope_theta": rope["rope_theta"]}
    config = Phi3Config(**made, original_max_position_embeddings=original)
    config.rope_parameters.update(rope)
    return config


def phimoe(of: Said, header: Header, path: Path) -> PreTrainedConfig:
    """Return the configuration of Phi-MoE."""
    from transformers import PhimoeConfig

    made, _, factor = _phi(of, header, path)
    if factor is not None:
        raise of.misunderstood("rope.scaling.attn_factor", factor)
    if made["rope_parameters"]["rope_type"] == "longrope":
        made["rope_parameters"] |= dict.fromkeys(("short_mscale", "long_mscale"), _AMPLITUDE)
    return PhimoeConfig(
        **made,
        num_local_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        attention_bias=biased(header, "attn_q"),
        lm_head_bias="output.bias" in header.tensors,
    )


def phi2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Phi-1 to 2."""
    from transformers import PhiConfig

    return PhiConfig(**usual(of, header, partial(rotary, partly=True), sized=False, norms="layer_norm_eps"))


def minicpm(of: Said, header: Header, path: Path) -> PreTrainedConfig:
    """Return a configuration for MiniCPM, which transformers does not have; it computes what Granite does."""
    from transformers import GraniteConfig

    factors = _factors(of, header, path)
    made = usual(of, header, sized=False)
    hidden: int = made["hidden_size"]
    size = hidden // made["num_attention_heads"]
    made["rope_parameters"] = _stretch(made["rope_parameters"], factors, size, made["max_position_embeddings"])
    return GraniteConfig(
        **made,
        attention_multiplier=size**-0.5,
        embedding_multiplier=of.number("embedding_scale", _EMBEDDED),
        residual_multiplier=of.number("residual_scale", _DEEP / math.sqrt(of.layers)),
        logits_scaling=of.number("logit_scale", hidden / _BASE),
    )


def minicpm3(of: Said, header: Header, path: Path) -> PreTrainedConfig:
    """Return the configuration of MiniCPM 3, whose files do not give its factors."""
    from transformers import MiniCPM3Config

    factors = _factors(of, header, path)
    made = common(of, header)
    if (keys := made["num_key_value_heads"]) != made["num_attention_heads"]:
        raise of.misunderstood("attention.head_count_kv", keys)
    turned, size = of.take("rope.dimension_count", int), of.take("attention.key_length", int)
    return MiniCPM3Config(
        **made,
        intermediate_size=of.take("feed_forward_length", int),
        rms_norm_eps=of.number(RMS),
        q_lora_rank=of.take("attention.q_lora_rank", int, 0) or None,
        kv_lora_rank=of.take("attention.kv_lora_rank", int),
        qk_rope_head_dim=turned,
        qk_nope_head_dim=size - turned,
        scale_emb=_EMBEDDED,
        scale_depth=_DEEP,
        dim_model_base=_BASE,
        rope_parameters=_stretch(rotary(of, turned), factors, turned, made["max_position_embeddings"]),
    )
