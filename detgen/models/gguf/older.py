"""Configurations of older families, from GGUF files; see `detgen/models/gguf/dense.py`.

Most join queries, keys and values in one weight: by key heads in the model, one after the other in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said
from detgen.models.gguf.dense import MEAN, RMS, THETA, biased, common, rotary
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STEEPEST = 8.0  # MPT's largest slope, whatever a configuration says; transformers knows no other
_NEOX_20B = 44  # layers of the GPT-NeoX with another activation, whatever a file says


def by_heads(config: Any) -> Mapping[str, Change]:
    """Return the changes of queries, keys and values: each key head has its queries, its key and its value together."""
    heads: int = config.num_attention_heads
    keys, size = getattr(config, "num_kv_heads", heads), config.hidden_size // heads
    queries, *others = np.split(np.arange((heads + 2 * keys) * size), [heads * size, (heads + keys) * size])
    rows = np.concatenate([part.reshape(keys, -1) for part in (queries, *others)], 1).ravel()
    return {f"attn_qkv.{kind}": Change(rows) for kind in ("weight", "bias")}


def _usual(of: Said, header: Header) -> dict[str, Any]:
    """Return what all share; feed-forwards are four times as wide as the model."""
    made = common(of, header)
    of.agree("feed_forward_length", 4 * made["hidden_size"])
    return made | {"layer_norm_epsilon": of.number(MEAN)}


def _alike(of: Said, made: dict[str, Any]) -> None:
    """Refuse fewer key heads than query heads."""
    if (keys := made.pop("num_key_value_heads")) != made["num_attention_heads"]:
        raise of.misunderstood("attention.head_count_kv", keys)


def falcon(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Falcon 7B, 40B, 180B or 2; files of 2 must give its rotary base, as few do."""
    from transformers import FalconConfig

    made = _usual(of, header)
    keys = made.pop("num_key_value_heads")
    of.agree("tensor_data_layout", "jploski")
    two = "blk.0.attn_norm_2.weight" in header.tensors  # norms before attention and feed-forward
    theta = of.number("rope.freq_base", None if keys > 1 and not two else THETA)
    return FalconConfig(
        **made,
        num_kv_heads=keys,
        new_decoder_architecture=keys > 1,
        num_ln_in_parallel_attn=1 + two,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def bloom(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of Bloom, which has no longest context, since ALiBi replaces positions."""
    from transformers import BloomConfig

    made = _usual(of, header)
    _alike(of, made)
    made.pop("max_position_embeddings")
    return BloomConfig(**made)


def mpt(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of MPT."""
    from transformers import MptConfig

    made = _usual(of, header)
    _alike(of, made)
    if (steepest := of.number("attention.max_alibi_bias")) != _STEEPEST:
        raise of.misunderstood("attention.max_alibi_bias", steepest)
    made["max_seq_len"] = made.pop("max_position_embeddings")
    clamp = of.number("attention.clamp_kqv", 0.0) or None
    return MptConfig(**made, attn_config={"clip_qkv": clamp})


def gptneox(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of GPT-NeoX, such as Pythia."""
    from transformers import GPTNeoXConfig

    made = common(of, header)
    _alike(of, made)
    return GPTNeoXConfig(
        **made,
        intermediate_size=of.take("feed_forward_length", int),
        layer_norm_eps=of.number(MEAN),
        hidden_act="gelu_fast" if of.layers == _NEOX_20B else "gelu",
        use_parallel_residual=of.take("use_parallel_residual", bool),
        attention_bias=biased(header, "attn_qkv"),
        rope_parameters=rotary(of, made["hidden_size"] // made["num_attention_heads"], partly=True),
    )


def starcoder(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the first StarCoder, whose heads share one key and one value."""
    from transformers import GPTBigCodeConfig

    made = _usual(of, header)
    if (keys := made.pop("num_key_value_heads")) != 1:
        raise of.misunderstood("attention.head_count_kv", keys)
    return GPTBigCodeConfig(**made, n_inner=4 * made["hidden_size"])


def exaone(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return a configuration for EXAONE 3 and 3.5, which transformers does not have; they compute what Llama does."""
    from transformers import LlamaConfig

    made = common(of, header)
    return LlamaConfig(
        **made,
        intermediate_size=of.take("feed_forward_length", int),
        rms_norm_eps=of.number(MEAN if of.says(MEAN) else RMS),  # the norms are the same, whatever a file calls them
        rope_parameters=rotary(of, made["hidden_size"] // made["num_attention_heads"]),
    )
