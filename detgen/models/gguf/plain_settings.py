"""Architectures of plain decoders in GGUF files, and their settings under the names of transformers' configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from detgen.models.gguf.configs import FACTORS, LARGEST_GEMMAS, Said, not_understood
from detgen.models.gguf.families import GGUF_FAMILIES
from detgen.models.gguf.header import Header
from detgen.models.stored import Place, whole
from detgen.program.arrays import floats

_SIZES = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_LARGEST = 1e30  # limit of the base of a rotary embedding, and of its factors
_FULL, _WINDOW = "full_attention", "sliding_attention"


class Kind(NamedTuple):
    """The traits that distinguish an architecture.

    Attributes:
        name: prefix of the names of transformers' classes.
        model_type: transformers' name of the family.
        heads: how the size of heads is known: width over their number, given, or given if different from that.
        turned: whether rows of queries and keys that are rotated together are adjacent.
        biased: whether queries, keys and values have biases.
        normed: whether heads of queries and keys have norms.
        joined: whether queries, keys and values are one layer, and gates with what they open another.
        full_each: period of layers with full attention; others have a window; 0 if no layer has one.
        mixed: whether it is a mixture of experts, and whether one of them is shared.
    """

    name: str
    model_type: str
    heads: Literal["usual", "said", "any"]
    turned: bool = False
    biased: bool = False
    normed: bool = False
    joined: bool = False
    full_each: int = 0
    mixed: Literal["", "experts", "shared"] = ""

    @property
    def gemma(self) -> bool:
        """Whether embeddings are scaled, norms add 1 to their weights, and layers have norms after their parts, too."""
        return self.name.startswith("Gemma")


_KINDS = {
    "llama": Kind("Llama", "llama", "any", turned=True),
    "qwen2": Kind("Qwen2", "qwen2", "usual", biased=True),
    "qwen3": Kind("Qwen3", "qwen3", "said", normed=True),
    "phi3": Kind("Phi3", "phi3", "usual", joined=True),
    "gemma2": Kind("Gemma2", "gemma2", "said", full_each=2),
    "gemma3": Kind("Gemma3", "gemma3_text", "said", normed=True, full_each=6),
    "qwen2moe": Kind("Qwen2Moe", "qwen2_moe", "usual", biased=True, mixed="shared"),
    "qwen3moe": Kind("Qwen3Moe", "qwen3_moe", "said", normed=True, mixed="experts"),
}
_MIXTRAL = Kind("Mixtral", "mixtral", "any", turned=True, mixed="experts")
_PADDING = 32000  # Phi-3's padding token, which must exist


def kind_of(header: Header) -> Kind | None:
    """Return the kind of a file's decoder; None if it is none of these."""
    if header.settings.get("general.name") == "mistral":  # transformers takes it for another family
        return None
    mixed = header.architecture == "llama" and "llama.expert_count" in header.settings
    return _MIXTRAL if mixed else _KINDS.get(header.architecture)


def settings_of(header: Header, path: Path, kind: Kind) -> dict[str, Any]:
    """Return the settings of a file.

    Raises:
        ValueError: if one is missing or not understood.
    """
    of, rows = Said(header), len(header.settings["tokenizer.ggml.tokens"])
    of.agree("vocab_size", rows)
    sizes = {name: of.take(said, int) for name, said in _SIZES.items()} | {"num_hidden_layers": of.layers}
    heads, kept, hidden, *_ = sizes.values()
    if min(sizes.values()) < 1 or heads % kept or hidden % heads:
        raise not_understood("sizes", sizes)
    said = [of.take(name, int, 0) for name in _HEADS]
    size = next((size for size in said if size), hidden // heads)
    known = {"usual": size == hidden // heads, "said": any(said[:2]), "any": True}[kind.heads]
    if not known or size % 2 or not {*said} <= {0, size}:
        raise not_understood("sizes of heads", said)
    epsilon = _number(of, header, "attention.layer_norm_rms_epsilon")
    if not 0 < epsilon < 1:
        raise of.misunderstood("attention.layer_norm_rms_epsilon", epsilon)
    config = {
        **sizes,
        "model_type": kind.model_type,
        "vocab_size": rows,
        "rms_norm_eps": epsilon,
        "rope_parameters": _rotary(of, header, path, kind, size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **({} if kind.heads == "usual" else {"head_dim": size}),
        **(_gemmas(of, header, kind, size, hidden // heads) if kind.gemma else {}),
        **(_experts(of, kind) if kind.mixed else {}),
    }
    if kind.name == "Phi3":
        of.agree("rope.scaling.original_context_length", config["max_position_embeddings"])
        window = of.take("attention.sliding_window", int, 0)
        if window < 0 or rows <= _PADDING:
            raise of.misunderstood("attention.sliding_window", window)
        config["sliding_window"] = window or None
    if kind.name in ("Qwen2", "Qwen2Moe", "Qwen3"):
        config["layer_types"] = [_FULL] * of.layers
    of.end()
    return config


def _number(of: Said, header: Header, name: str) -> float:
    """Take a number as transformers does, or as the family's entry in `GGUF_FAMILIES` would; errors as `take`."""
    return of.number(name) if header.architecture in GGUF_FAMILIES else of.take(name, float)


def _rotary(of: Said, header: Header, path: Path, kind: Kind, size: int) -> dict[str, Any]:
    """Return settings of the rotary embedding, one per kind of layer if there are several; errors as `settings_of`."""
    rotary: dict[str, Any] = {"rope_theta": _number(of, header, "rope.freq_base"), "rope_type": "default"}
    scaling = of.take("rope.scaling.type", str, "none")
    if scaling == "linear" and kind.name != "Phi3":
        rotary |= {"rope_type": scaling, "factor": _number(of, header, "rope.scaling.factor")}
    elif scaling != "none":
        raise of.misunderstood("rope.scaling.type", scaling)
    of_windows = of.take("rope.freq_base_swa", float, 1e4) if kind.name == "Gemma3" else 1e4
    if not min(rotary["rope_theta"], of_windows) > 1 or not max(rotary["rope_theta"], of_windows) < _LARGEST:
        raise of.misunderstood("rope.freq_base", rotary["rope_theta"])
    if not 1 <= rotary.get("factor", 1) < _LARGEST:
        raise of.misunderstood("rope.scaling.factor", rotary["factor"])
    if kind.name == "Phi3":
        rotary["partial_rotary_factor"] = 1.0
    entry = header.tensors.get(FACTORS)
    if kind.name == "Gemma3" and entry is None:
        return {_WINDOW: {"rope_theta": of_windows, "rope_type": "default"}, _FULL: rotary}
    if entry is not None:
        factors = floats(whole(Place(path, entry.kind, entry.shape, entry.at, FACTORS).read()))
        if kind.name == "Gemma3" or factors.shape != (size // 2,) or not ((factors > 0) & (factors < _LARGEST)).all():
            raise not_understood(FACTORS, factors.shape)
        rotary["frequency_factors"] = factors.tolist()
    return rotary


def _gemmas(of: Said, header: Header, kind: Kind, size: int, usual: int) -> dict[str, Any]:
    """Return Gemma's settings; `size` is that of its heads, `usual` the default size; errors as `settings_of`."""
    window = of.take("attention.sliding_window", int)
    if window < 1 or "output.weight" in header.tensors:
        raise of.misunderstood("attention.sliding_window", window)
    found: dict[str, Any] = {
        "sliding_window": window,
        "layer_types": [_WINDOW if (i + 1) % kind.full_each else _FULL for i in range(of.layers)],
        "query_pre_attn_scalar": usual if of.layers == LARGEST_GEMMAS[header.architecture] else size,
    }
    if kind.name == "Gemma2":
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            found[name] = of.take(name, float, default)
            if not 0 < found[name] < _LARGEST:
                raise of.misunderstood(name, found[name])
    return found


def _experts(of: Said, kind: Kind) -> dict[str, Any]:
    """Return the settings of mixtures of experts; errors as `settings_of`."""
    names = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    if kind.name != "Mixtral":
        names["moe_intermediate_size"] = "expert_feed_forward_length"
    if kind.mixed == "shared":
        names["shared_expert_intermediate_size"] = "expert_shared_feed_forward_length"
    found = {name: of.take(said, int) for name, said in names.items()}
    if min(found.values()) < 1 or found["num_experts_per_tok"] > found["num_experts"]:
        raise not_understood("sizes of experts", found)
    return found
