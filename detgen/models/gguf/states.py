"""What the GGUF files of families with states say, as far as several of them say it alike."""

from __future__ import annotations

from typing import Any

from detgen.models.gguf.configs import Said, rows_of
from detgen.models.gguf.header import Header

Names = dict[str, tuple[str, int | None]]  # of parameters, and their parts, see `GgufFamily`
ATTENTION, RECURRENT = "full_attention", "linear_attention"  # kinds of layers
EPSILON = "attention.layer_norm_rms_epsilon"


def whole_of(of: Said, header: Header) -> dict[str, Any]:
    """Sizes that all have."""
    vocabulary = rows_of(header, "token_embd.weight")
    of.agree("vocab_size", vocabulary)
    return {
        "vocab_size": vocabulary,
        "hidden_size": of.take("embedding_length", int),
        "max_position_embeddings": of.take("context_length", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def heads_of(of: Said, hidden: int, kept: int | None = None) -> dict[str, int]:
    """Of attentions that are alike in all layers that have one; keys and values may be known already."""
    heads = of.take("attention.head_count", int)
    size = of.take("attention.key_length", int, hidden // heads)
    of.agree("attention.value_length", size)
    kept = of.take("attention.head_count_kv", int) if kept is None else kept
    return {"num_attention_heads": heads, "num_key_value_heads": kept, "head_dim": size}


def heads_of_layers(of: Said) -> list[int]:
    """Keys and values of each layer: 0 in those that have no attention, and as many in all others."""
    kept = of.each("attention.head_count_kv", int)
    if len({*kept} - {0}) != 1:
        raise of.misunderstood("attention.head_count_kv", tuple(kept))
    return kept


def has(header: Header, part: str) -> bool:
    """Whether there is a tensor that a layer calls so."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in header.tensors)


def wider_of(of: Said, inner: int, hidden: int) -> int:
    """How many times as wide as a model its mixers are.

    Raises:
        ValueError: if that is no whole number.
    """
    if inner % hidden:
        raise of.misunderstood("ssm.inner_size", inner)
    return inner // hidden


def alone_of(of: Said, header: Header) -> dict[str, Any]:
    """What Mambas without attentions have."""
    whole = whole_of(of, header)
    del whole["max_position_embeddings"]  # of which they know nothing
    for name in ("feed_forward_length", "attention.head_count"):
        of.agree(name, 0)
    return whole | {"num_hidden_layers": of.layers, "layer_norm_epsilon": of.number(EPSILON)}
