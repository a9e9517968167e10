"""Configurations of families whose layers are alike, from GGUF files as llama.cpp's converter writes them.

Files omit what a family always has, which llama.cpp knows by the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.gguf.configs import Said, rows_of
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EVERY = 4  # every fourth layer has full attention, or no rotary embedding
THETA = 10000.0  # base of rotary embeddings if a file gives none; Hunyuan's before it is multiplied
_WINDOWED = 64  # layers of the EXAONE 4 that has windows, whatever a file says
_OLMO_EPSILON = 1e-5  # in the norms of the first OLMo
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def common(of: Said, header: Header) -> dict[str, Any]:
    """Return the settings that all families have."""
    vocabulary = rows_of(header, "token_embd.weight")
    of.agree("vocab_size", vocabulary)
    heads = of.take("attention.head_count", int)
    return {
        "vocab_size": vocabulary,
        "num_hidden_layers": of.layers,
        "hidden_size": of.take("embedding_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": of.take("attention.head_count_kv", int, heads),
        "max_position_embeddings": of.take("context_length", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "pad_token_id": None,  # a default may not exist in a smaller vocabulary
    }


def rotary(of: Said, size: int, *, partly: bool = False, multiplier: float = 0.0) -> dict[str, Any]:
    """Return the rotary embedding of heads of a size.

    Args:
        of: the file's settings.
        size: size of the part of a head that may rotate.
        partly: whether only a part of that may rotate.
        multiplier: factor from a file's multiplier of YaRN's logarithms to the configuration's; 0 if unused.
    """
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": of.number("rope.freq_base", THETA)}
    turned = of.take("rope.dimension_count", int, size)
    if turned != size and (not partly or not 0 < turned < size):
        raise of.misunderstood("rope.dimension_count", turned)
    if partly:
        share = turned / size  # rounding it down must give the same number again
        made["partial_rotary_factor"] = share if int(size * share) == turned else (turned + 0.5) / size
    kind = of.take("rope.scaling.type", str, "none")
    if kind == "none":
        return made
    if kind not in ("linear", "yarn"):
        raise of.misunderstood("rope.scaling.type", kind)
    made |= {"rope_type": kind, "factor": of.number("rope.scaling.factor")}
    if kind == "yarn":
        made["original_max_position_embeddings"] = of.take("rope.scaling.original_context_length", int)
        made["beta_fast"] = of.number("rope.scaling.yarn_beta_fast", 32.0)
        made["beta_slow"] = of.number("rope.scaling.yarn_beta_slow", 1.0)
        as_usual, factor = 0.1 * math.log(made["factor"]) + 1, of.number("rope.scaling.yarn_attn_factor", 0.0)
        if factor and np.float32(as_usual) != np.float32(factor):
            made["attention_factor"] = factor
        if multiplier and (logarithms := of.number("rope.scaling.yarn_log_multiplier", 0.0)):
            made["mscale"] = made["mscale_all_dim"] = round(logarithms * multiplier, 6)
    return made


def usual(
    of: Said,
    header: Header,
    rotates: Callable[[Said, int], dict[str, Any]] = rotary,
    *,
    sized: bool = True,
    norms: str = "rms_norm_eps",
) -> dict[str, Any]:
    """Return the settings of decoders whose heads have one size.

    Args:
        of: the file's settings.
        header: the file's header.
        rotates: returns the rotary embedding of heads of a size.
        sized: whether the configuration has the size of heads; otherwise it follows from the hidden size.
        norms: the configuration's name of the epsilon of norms.
    """
    made = common(of, header)
    theirs: int = made["hidden_size"] // made["num_attention_heads"]
    size = of.take("attention.key_length", int, theirs)
    of.agree("attention.value_length", size)
    if not sized and size != theirs:
        raise of.misunderstood("attention.key_length", size)
    return {
        **made,
        **({"head_dim": size} if sized else {}),
        norms: of.number(RMS if norms == "rms_norm_eps" else MEAN),
        "intermediate_size": of.take("feed_forward_length", int),
        "rope_parameters": rotates(of, size),
    }


def kinds_of(windows: list[bool]) -> list[str]:
    """Return transformers' names of layers with a window, and of layers with full attention."""
    return ["sliding_attention" if window else "full_attention" for window in windows]


def biased(header: Header, tensor: str) -> bool:
    """Return whether layers have a bias for a tensor."""
    return f"blk.0.{tensor}.bias" in header.tensors or (tensor == "attn_q" and biased(header, "attn_qkv"))


def granite_settings(of: Said, header: Header) -> dict[str, Any]:
    """Return the settings of Granite's models."""
    return {
        **usual(of, header, sized=False),
        "attention_multiplier": of.number("attention.scale"),
        "embedding_multiplier": of.number("embedding_scale", 1.0),
        "residual_multiplier": of.number("residual_scale", 1.0),
        "logits_scaling": of.number("logit_scale"),
        "attention_bias": biased(header, "attn_q"),
    }


def granite(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Granite 3 and dense Granite 4."""
    from transformers import GraniteConfig

    return GraniteConfig(**granite_settings(of, header), mlp_bias=biased(header, "ffn_up"))


def smollm3(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of SmolLM3, in which every fourth layer has no rotary embedding."""
    from transformers import SmolLM3Config

    return SmolLM3Config(
        **usual(of, header, sized=False),
        no_rope_layers=[int((i + 1) % EVERY != 0) for i in range(of.layers)],
        attention_bias=biased(header, "attn_q"),
        mlp_bias=biased(header, "ffn_up"),
    )


def olmo2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of OLMo 2; with windows, of OLMo 3, whose layers with windows are not stretched."""
    from transformers import Olmo2Config, Olmo3Config

    made = usual(of, header, sized=False) | {"attention_bias": biased(header, "attn_q")}
    window = of.take("attention.sliding_window", int, 0)
    if not window:
        return Olmo2Config(**made)
    rope = made.pop("rope_parameters")
    own = {"rope_type": "default", "rope_theta": of.number("rope.freq_base_swa", rope["rope_theta"])}
    return Olmo3Config(
        **made,
        sliding_window=window,
        layer_types=kinds_of(of.each("attention.sliding_window_pattern", bool)),
        rope_parameters={"full_attention": rope, "sliding_attention": own},
    )


def olmo(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the first OLMo, whose norms have no weights."""
    from transformers import OlmoConfig

    made = usual(of, header, sized=False, norms="layer_norm_eps")
    if (epsilon := made.pop("layer_norm_eps")) != _OLMO_EPSILON:
        raise of.misunderstood(MEAN, epsilon)
    return OlmoConfig(**made, clip_qkv=of.number("attention.clamp_kqv", 0.0) or None)


def glm(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of GLM-4 before 0414."""
    from transformers import GlmConfig

    return GlmConfig(**usual(of, header, partial(rotary, partly=True)), attention_bias=biased(header, "attn_q"))


def glm4(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of GLM-4 from 0414 on."""
    from transformers import Glm4Config

    return Glm4Config(**usual(of, header, partial(rotary, partly=True)), attention_bias=biased(header, "attn_q"))


def mistral3(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Ministral 3, whose queries grow with position, or of Mistral Small 3's text model."""
    from transformers import Ministral3Config, MistralConfig

    made = usual(of, header, partial(rotary, multiplier=1.0)) | {"sliding_window": None}
    if made["rope_parameters"].get("mscale", 1) != 1:  # a file gives only one of the two
        raise of.misunderstood("rope.scaling.yarn_log_multiplier", made["rope_parameters"]["mscale"])
    growing = of.number("attention.temperature_scale", 0.0)
    if not growing:
        return MistralConfig(**made)
    if made["rope_parameters"]["rope_type"] != "yarn":  # which gives the position where growth begins
        raise of.misunderstood("attention.temperature_scale", growing)
    made["rope_parameters"]["llama_4_scaling_beta"] = growing
    return Ministral3Config(**made)


def cohere2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Command R7B and A; every fourth layer has full attention and no rotary embedding."""
    from transformers import Cohere2Config

    windows = [(i + 1) % EVERY != 0 for i in range(of.layers)]
    if of.says("attention.sliding_window_pattern"):
        windows = of.each("attention.sliding_window_pattern", bool)
    return Cohere2Config(
        **usual(of, header, norms="layer_norm_eps"),
        logit_scale=of.number("logit_scale"),
        sliding_window=of.take("attention.sliding_window", int),
        layer_types=kinds_of(windows),
    )


def exaone4(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of EXAONE 4: with windows, when only layers that have one rotate, or without."""
    from transformers import Exaone4Config

    window = of.take("attention.sliding_window", int, None if of.layers == _WINDOWED else 0)
    windows = of.each("attention.sliding_window_pattern", bool) if window else [False] * of.layers
    return Exaone4Config(**usual(of, header), sliding_window=window or None, layer_types=kinds_of(windows))


def seed_oss(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Seed-OSS."""
    from transformers import SeedOssConfig

    return SeedOssConfig(
        **usual(of, header),
        attention_bias=biased(header, "attn_q"),
        attention_out_bias=biased(header, "attn_output"),
        mlp_bias=biased(header, "ffn_up"),
    )


def arcee(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of AFM."""
    from transformers import ArceeConfig

    return ArceeConfig(**usual(of, header), attention_bias=biased(header, "attn_q"), mlp_bias=biased(header, "ffn_up"))


def stretched(of: Said, size: int) -> dict[str, Any]:
    """Return Hunyuan's rotary embedding; the base in a file has been multiplied by a power of a whole number."""
    if not of.says("rope.scaling.type"):
        return rotary(of, size)
    of.agree("rope.scaling.factor", 1)
    of.take("rope.scaling.original_context_length", int, 0)  # the same as the whole context
    made, power = rotary(of, size), size / (size - 2)
    alpha = round((made["rope_theta"] / THETA) ** (1 / power))
    if np.float32(THETA * alpha**power) == np.float32(made["rope_theta"]):
        return {"rope_type": "dynamic", "rope_theta": THETA, "factor": 1.0, "alpha": float(alpha)}
    return made


def hunyuan(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Hunyuan's models without experts."""
    from transformers import HunYuanDenseV1Config

    return HunYuanDenseV1Config(**usual(of, header, stretched), attention_bias=biased(header, "attn_q"))


def ernie(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of ERNIE 4.5."""
    from transformers import Ernie4_5Config

    return Ernie4_5Config(**usual(of, header), use_bias=biased(header, "attn_q"))


def cohere(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Command R and Aya."""
    from transformers import CohereConfig

    return CohereConfig(
        **usual(of, header, sized=False, norms="layer_norm_eps"),
        logit_scale=of.number("logit_scale"),
        use_qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
    )


def jais2(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Jais 2."""
    from transformers import Jais2Config

    return Jais2Config(**usual(of, header, norms="layer_norm_eps"))


def gemma(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the first Gemma."""
    from transformers import GemmaConfig

    return GemmaConfig(**usual(of, header))
