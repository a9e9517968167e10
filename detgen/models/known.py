"""The models on this machine, and the memory each takes, read from the headers of their files. Nothing is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from detgen.errors import DEMO, EngineError
from detgen.models.families import FAMILIES
from detgen.models.folders import EMBEDDED, Tensor, check_folder, local_place
from detgen.models.gguf.header import read_header

_BITS = {"float32": 32.0, "bfloat16": 16.0, "q8": 8.5, "q4_k": 4.5}
_TOWERS = re.compile(
    r"(^|\.)(embed_)?(vision|visual|audio)[a-z_]*\.|multi_modal_projector|\.connector\."
)  # which are not read
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_TABLE = re.compile(r"\b(embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_NOT_QUANTIZED = re.compile(r"embed_(tokens|in|positions)|word_embeddings|wte|wpe|norm|\bln_|bias$")

_WITHOUT_KEYS = ("linear_attention", "conv", "mamba", "moe", "mlp")  # kinds of layers without keys


class Tried(NamedTuple):
    """A family of transformers, and how it runs according to `tools/families.py`.

    Attributes:
        name: the type of its models.
        model: its class.
        status: whole, own forward or refused.
        remark: which operators were proved, or why it is refused; may be empty.
    """

    name: str
    model: str
    status: str
    remark: str


def tried_families() -> tuple[str, list[Tried]]:
    """Return the version of transformers whose families were tried, and the result for each."""
    said = json.loads((Path(__file__).parent / "tried.json").read_text(encoding="utf-8"))
    return said["transformers"], [Tried(name, *row) for name, row in said["families"].items()]


class Known(NamedTuple):
    """A model, or why it cannot be loaded. Sizes are approximate: weights laid out for the CPU may be a little larger.

    Attributes:
        name: its name for `--target`.
        family: its class in transformers, or its architecture in a GGUF file.
        whole: whether its family is known to run whole.
        parameters: number of weights.
        stored: bytes of the weights as stored, which is also what they take in memory.
        weights: bytes by number format and quantization; empty where weights stay as stored.
        kv: bytes of a token in the KV cache, in float32; None if the settings do not say.
        error: why it cannot be loaded; None if nothing is known to be wrong.
    """

    name: str
    family: str = ""
    whole: bool = False
    parameters: int = 0
    stored: int = 0
    weights: Mapping[str, int] = MappingProxyType({})
    kv: int | None = None
    error: str | None = None


def known_models(names: list[str]) -> Iterator[Known]:
    """Return the named models; without names, the embedded ones and those in the hub's cache.

    Args:
        names: names as for `--target`; a folder of models stands for all of them.
    """
    for name in names or ["embedded:target", *EMBEDDED, *_in_hub_cache()]:
        place = Path(name)
        if place.is_dir() and not (place / "config.json").exists():
            inside = sorted(p for p in place.iterdir() if (p / "config.json").exists() or p.suffix == ".gguf")
            yield from (known(str(path), path) for path in inside)
            if inside:
                continue
        yield known(name, DEMO / "target" if name == "embedded:target" else None)


def known(name: str, place: Path | None = None) -> Known:
    """Return what the files of a model say about it.

    Args:
        name: name of the model.
        place: its folder or file; None if the name tells, or is a name on the hub.
    """
    try:
        place = place or local_place(name, name) or _in_hub_cache().get(name)
        if place is None:
            return Known(name, error="it is not on this machine yet; detgen run --target fetches it")
        return _gguf(name, place) if place.is_file() else _folder(name, place)
    except EngineError as error:
        return Known(name, error=str(error))


def _in_hub_cache() -> dict[str, Path]:
    """Return the folders of the models in the hub's cache, by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):  # there is none, or none that can be read
        return {}
    found = {}
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        newest = max(repository.revisions, key=lambda each: each.last_modified, default=None)
        if repository.repo_type == "model" and newest and (newest.snapshot_path / "config.json").exists():
            found[repository.repo_id] = newest.snapshot_path
    return found


def _folder(name: str, place: Path) -> Known:
    tensors = check_folder(place, name, trusted=True).tensors
    settings = json.loads((place / "config.json").read_bytes())
    family = next(iter(settings.get("architectures") or ()), "unknown")
    tensors = [tensor for tensor in tensors if not _TOWERS.search(tensor.name)]
    counts = [(tensor, math.prod(tensor.shape)) for tensor in tensors]
    weights = {}
    if "quantization_config" not in settings:
        linear = sum(count for tensor, count in counts if _is_linear(tensor))
        plain = sum(count for _, count in counts) - linear
        # A head tied to the embedding is the same weight, unless it is quantized, which the embedding never is.
        head = 0 if any(_HEAD.search(t.name) for t in tensors) else sum(c for t, c in counts if _TABLE.search(t.name))
        for kind, bits in _BITS.items():
            weights[kind] = round((linear * bits + (plain * bits if bits >= 16 else head * bits + plain * 32)) / 8)
    stored = sum(tensor.size for tensor in tensors)
    whole = family in FAMILIES or family == "ThinkingStatesForCausalLM"
    return Known(name, family, whole, sum(c for _, c in counts), stored, weights, kv_of(settings))


def kv_of(settings: Mapping[str, Any]) -> int | None:
    """Return the bytes of a token's keys and values in float32, by a model's settings; None if they do not say."""
    text = settings.get("text_config") or settings
    if any(text.get(name) for name in ("per_layer_config", "global_head_dim")):
        return _by_layer(text)
    layers = _with_keys(text)
    if not layers:
        return layers
    heads = _number(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    if "kv_lora_rank" in text:
        sizes = [_number(text, name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        return 4 * layers * sum(sizes) if layers and all(sizes) else None
    kept = _number(text, "num_key_value_heads")
    if text.get("new_decoder_architecture"):  # Falcon's
        kept = _number(text, "num_kv_heads", "n_head_kv")
    elif text.get("multi_query"):
        kept = 1
    return _kv(layers, heads, _number(text, "hidden_size", "n_embd", "d_model"), _number(text, "head_dim"), kept)


def _by_layer(settings: Mapping[str, Any]) -> int | None:
    """Like `kv_of`, where some layers have key heads of other sizes, as in Gemma 4; the last may keep nothing."""
    kinds, found = settings.get("layer_types") or [], 0
    listed = settings.get("per_layer_config") or {}
    for i, kind in enumerate(kinds[: len(kinds) - _number(settings, "num_kv_shared_layers")]):
        own = listed.get(str(i), {})
        if not listed and kind == "full_attention":
            kept = settings.get("num_global_key_value_heads") if settings.get("attention_k_eq_v") else None
            own = {"head_dim": settings["global_head_dim"], "num_key_value_heads": kept}
        heads, size = (_number(own, name) or _number(settings, name) for name in ("num_key_value_heads", "head_dim"))
        found += 2 * 4 * heads * size
    return found or None


def _by_layer_of(said: Mapping[str, Any]) -> int | None:
    """Like `_by_layer`, for a GGUF file; None if all layers have heads of one size."""
    windows, heads = said.get("attention.sliding_window_pattern"), said.get("attention.head_count_kv")
    if not isinstance(windows, tuple) or "attention.key_length_swa" not in said:
        return None
    counts = heads if isinstance(heads, tuple) else (heads,) * len(windows)
    sizes = [_number(said, f"attention.key_length{'_swa' * bool(window)}") for window in windows]
    own = len(windows) - _number(said, "attention.shared_kv_layers")
    return 2 * 4 * sum(count * size for count, size in zip(counts[:own], sizes, strict=False) if type(count) is int)


def _number(settings: Mapping[str, Any], *names: str) -> int:
    """Return the first setting of these names that is a number; 0 if there is none."""
    return next((found for name in names if type(found := settings.get(name)) is int), 0)


def _with_keys(settings: Mapping[str, Any]) -> int | None:
    """Return how many layers keep keys and values, not just a state; None if the settings do not say."""
    if settings.get("model_type") in ("mamba", "falcon_mamba", "mamba2"):
        return 0
    if isinstance(pattern := settings.get("hybrid_override_pattern"), str):  # Nemotron H's
        return pattern.count("*")
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba's, LFM2's
        if isinstance(indices := settings.get(name), list):
            return len(indices)
    if settings.get("model_type") == "jamba":
        every, first = (_number(settings, f"attn_layer_{name}") for name in ("period", "offset"))
        return len(range(first, _number(settings, "num_hidden_layers"), every or 1))
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    if isinstance(kinds, list):
        return sum(kind not in _WITHOUT_KEYS for kind in kinds) - _number(settings, "num_kv_shared_layers")
    layers = _number(settings, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers -= sum(i < layers for i in settings.get("cross_attention_layers") or ())  # Llama 3.2's, for images
    every = _number(settings, "full_attention_interval")
    if str(settings.get("model_type")).startswith(("qwen3_next", "qwen3_5")):
        every = every or 4  # transformers' default
    return layers // (every or 1) if layers else None


def _is_linear(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and not _NOT_QUANTIZED.search(tensor.name)


def _kv(layers: int, heads: int, width: int, size: int, kept: int) -> int | None:
    """Return the bytes of a token's keys and values in float32; None if the settings do not say.

    Args:
        layers: number of layers that keep some.
        heads: number of query heads.
        width: entries of a hidden state.
        size: entries of a head; 0 if heads share the width.
        kept: number of key and value heads; 0 for as many as query heads.
    """
    return 2 * 4 * layers * (kept or heads) * (size or width // heads) if layers and heads and width else None


def _gguf(name: str, place: Path) -> Known:
    header = read_header(place, name)
    family, tensors = header.architecture, header.tensors.values()
    said = {key.removeprefix(f"{family}."): value for key, value in header.settings.items()}
    if (kv := _by_layer_of(said)) is None:
        names = ("attention.head_count", "embedding_length", "attention.key_length", "attention.head_count_kv")
        heads, width, size, kept = (_number(said, name) for name in names)
        if isinstance(each := said.get("attention.head_count_kv"), tuple):
            kept = max(each)
        unkept = sum(_number(said, key) for key in ("nextn_predict_layers", "attention.shared_kv_layers"))
        layers = own = _number(said, "block_count") - unkept
        if any(name.startswith(("ssm.", "shortconv.")) for name in said):  # in place of keys, in other layers
            layers = sum(f"blk.{i}.attn_k.weight" in header.tensors for i in range(own))
        kv = _kv(layers, heads, width, size, kept) if layers or not own else 0
        if "attention.kv_lora_rank" in said:  # from which keys and values of all heads are made
            kv = 4 * layers * (_number(said, "attention.kv_lora_rank") + _number(said, "rope.dimension_count"))
    parameters = sum(math.prod(entry.shape) for entry in tensors)
    return Known(name, f"GGUF {family}", True, parameters, sum(entry.size for entry in tensors), {}, kv)
