"""Settings that GGUF files of several families with states have in common."""

from __future__ import annotations

from typing import Any

from detgen.models.gguf.configs import Said, rows_of
from detgen.models.gguf.header import Header

Names = dict[str, tuple[str, int | None]]  # parameters and their parts; see `GgufFamily`
ATTENTION, RECURRENT = "full_attention", "linear_attention"  # kinds of layers
EPSILON = "attention.layer_norm_rms_epsilon"


def whole_of(of: Said, header: Header) -> dict[str, Any]:
    """Return the sizes that all families have."""
    vocabulary = rows_of(header, "token_embd.weight")
    of.agree("vocab_size", vocabulary)
    return {
        "vocab_size": vocabulary,
        "hidden_size": of.take("embedding_length", int),
        "max_position_embeddings": of.take("context_length", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def heads_of(of: Said, hidden: int, kept: int | None = None) -> dict[str, int]:
    """Return the heads of attention, the same in all layers that have it; `kept`: number of key heads, if known."""
    heads = of.take("attention.head_count", int)
    size = of.take("attention.key_length", int, hidden // heads)
    of.agree("attention.value_length", size)
    kept = of.take("attention.head_count_kv", int) if kept is None else kept
    return {"num_attention_heads": heads, "num_key_value_heads": kept, "head_dim": size}


def heads_of_layers(of: Said) -> list[int]:
    """Return the number of key heads of each layer: 0 without attention, and the same number in all other layers."""
    kept = of.each("attention.head_count_kv", int)
    if len({*kept} - {0}) != 1:
        raise of.misunderstood("attention.head_count_kv", tuple(kept))
    return kept


def has(header: Header, part: str) -> bool:
    """Return whether a layer has a tensor of this name."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in header.tensors)


def wider_of(of: Said, inner: int, hidden: int) -> int:
    """Return how many times as wide as the model its mixers are.

    Raises:
        ValueError: if that is not a whole number.
    """
    if inner % hidden:
        raise of.misunderstood("ssm.inner_size", inner)
    return inner // hidden


def alone_of(of: Said, header: Header) -> dict[str, Any]:
    """Return what Mambas without attention share."""
    whole = whole_of(of, header)
    del whole["max_position_embeddings"]  # which they do not have
    for name in ("feed_forward_length", "attention.head_count"):
        of.agree(name, 0)
    return whole | {"num_hidden_layers": of.layers, "layer_norm_epsilon": of.number(EPSILON)}
