"""Models from GGUF files: transformers has their settings, tokenizers and names; weights stay as they are stored.

Settings of a file that transformers ignores are applied here, or refused: a setting that is not understood could
change every output.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.description import describe
from detgen.models.gguf.changes import CHANGES, Change
from detgen.models.gguf.configs import (
    ELSE,
    FACTORS,
    LARGEST_GEMMAS,
    LONG_FACTORS,
    SHORT_FACTORS,
    not_understood,
)
from detgen.models.gguf.families import GGUF_FAMILIES, config_of
from detgen.models.gguf.header import Header
from detgen.models.gguf.places import place_of
from detgen.models.gguf.splits import BEGINS, MODEL, PREFIXED, begin_without_space, take_texts, way_of
from detgen.models.gguf.tokenizer import own_tokenizer
from detgen.models.stored import Below, Heads, Lying, Place, Reader, SideBySide, turned, whole, without_weights
from detgen.program.arrays import FLOAT32, floats
from detgen.program.arrays import tensor as as_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Settings that transformers does not take over, with their names in its configurations.
_LEFT_OUT = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_epsilon": "norm_eps",
    "use_parallel_residual": "use_parallel_residual",
    "rope.scaling.original_context_length": "original_max_position_embeddings",  # Phi-3's, also without scaling
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Bases of rotary embeddings, by the kind of layers if there are several.
_BASES = {"rope.freq_base": "full_attention", "rope.freq_base_swa": "sliding_attention"}
_CHECKED = {"rope.dimension_count", "vocab_size"}  # against the shapes of what is loaded
_CORRECTIONS = "e_score_correction_bias", "expert_bias"  # of experts' scores: buffers whose numbers a file has
# Architectures whose tokenizers are built like those of another one.
_TOKENIZED_AS = {
    "gemma3n": "gemma3",
    **dict.fromkeys(("phimoe", "minicpm", "minicpm3", "ernie4_5", "ernie4_5-moe"), "phi3"),
}
# Texts of the tokens that end a sequence, by architecture; a file has only one.
_ENDS = {
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), ("<|im_end|>", "<|endoftext|>")),
    **dict.fromkeys(("phi3", "phimoe"), ("<|end|>", "<|im_end|>", "<|endoftext|>")),
    **dict.fromkeys(("minicpm", "minicpm3"), ("</s>", "<|im_end|>")),
    **dict.fromkeys(("chatglm", "glm4", "glm4moe"), ("<|endoftext|>", "<|user|>", "<|observation|>")),
}


def settings(path: Path, header: Header) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer of a file.

    Raises:
        ValueError: if the file has settings that are not understood here.
    """
    from transformers import AutoConfig, AutoTokenizer, MixtralConfig, TokenizersBackend

    from detgen.models.gguf.quickly import quick_gguf

    config, way = config_of(header, path), way_of(header)
    if config is not None and way is not None and not GGUF_FAMILIES[header.architecture].tokenized:
        return config, own_tokenizer(header, path)
    # In a folder of its own, so that no file next to it has any influence.
    with TemporaryDirectory() as folder, quick_gguf():
        (Path(folder) / "model.gguf").symlink_to(path.resolve())
        _know_spaces(header)
        made = TokenizersBackend if config is not None else AutoTokenizer
        tokenizer = made.from_pretrained(folder, gguf_file="model.gguf")
        if _begins_at_once(header):
            begin_without_space(tokenizer.backend_tokenizer)
        if way is not None:
            take_texts(tokenizer.backend_tokenizer, way)
            if way.begins and BEGINS not in header.settings:
                tokenizer.add_bos_token = True
                tokenizer.update_post_processor()
        if config is not None:
            return config, tokenizer
        config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
    if config.model_type == "llama" and "llama.expert_count" in header.settings:  # llama.cpp's name of Mixtral, too
        given = config.to_dict()
        config = MixtralConfig(**{name: given[name] for name in given.keys() - {"model_type", "architectures"}})
    _complete(config, header)
    return config, tokenizer


def _begins_at_once(header: Header) -> bool:
    """Return whether a file says that no space precedes a text, where transformers would add one."""
    like_llama = header.settings.get(MODEL) == "llama" and not header.architecture.startswith("gemma")
    return like_llama and header.settings.get(PREFIXED) is False


def _know_spaces(header: Header) -> None:
    """Have transformers build tokenizers as for the families whose they are, instead of as Llama's.

    Raises:
        ValueError: if it does not know those either.
    """
    if (same := _TOKENIZED_AS.get(header.architecture)) is None:
        return
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_SENTENCEPIECE_BUILDERS as BUILDERS
    except ImportError:
        raise ValueError(f"this version of transformers makes no tokenizer of such GGUF files; {ELSE}") from None
    BUILDERS.setdefault(header.architecture, BUILDERS[same])


def _complete(config: Any, header: Header) -> None:
    """Take over what transformers leaves out.

    Raises:
        ValueError: if something is not understood; the message names it.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    known = GGUF_CONFIG_MAPPING.get(header.architecture) or GGUF_CONFIG_MAPPING.get(config.model_type, {})
    stretched = _stretch(config, header)
    if header.architecture in LARGEST_GEMMAS:
        # The files do not give the number whose root divides queries; llama.cpp knows it by the size of the model.
        largest = config.num_hidden_layers == LARGEST_GEMMAS[header.architecture]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
    if header.architecture == "gpt2":
        config.n_positions = config.n_ctx  # the size of the table
    for key, value in header.settings.items():
        family, _, setting = key.partition(".")
        if family != header.architecture or setting in _CHECKED | stretched or known.get(setting) is not None:
            continue
        name = _LEFT_OUT.get(setting, "")
        rotary = getattr(config, "rope_parameters", None) or {}
        rotary = rotary.get(_BASES.get(setting), rotary if setting == "rope.freq_base" else {})
        if setting in _BASES and "rope_theta" in rotary:
            rotary["rope_theta"] = value
        elif hasattr(config, name):
            setattr(config, name, None if name == "sliding_window" and not value else value)
        elif not (name == "head_dim" and value == config.hidden_size // config.num_attention_heads) and (
            setting != "rope.scaling.type" or value != "none"
        ):
            raise not_understood(key, value)


def _stretch(config: Any, header: Header) -> set[str]:
    """Divide the frequencies of a rotary embedding by a factor, if a file says so; return the settings that say it."""
    kind, factor = (header.settings.get(f"{header.architecture}.rope.scaling.{name}") for name in ("type", "factor"))
    if kind != "linear" or not isinstance(factor, float):
        return set()
    settings = config.rope_parameters
    settings.get("full_attention", settings).update(rope_type="linear", factor=factor)  # not Gemma 3's windows
    return {"rope.scaling.type", "rope.scaling.factor"}


def empty_model(
    config: Any, header: Header, path: Path, dtype: np.dtype[Any] | None = None
) -> tuple[PreTrainedModel, Reader]:
    """Return the model without weights, and a reader of weights in a number format, or as stored for None.

    Raises:
        ValueError: if the model is unknown here, or the weights are not those that its settings describe.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    from detgen.models.gguf.names import Names, alone

    model = without_weights(config, FLOAT32)
    if describe(model) is None:
        raise ValueError(f"GGUF files of the architecture {header.architecture} are not supported; {ELSE}")
    family = GGUF_FAMILIES.get(header.architecture)
    ways = header.architecture if family is None else family.like
    processor = TENSOR_PROCESSORS.get(ways, TensorProcessor)(config=config.to_dict())
    names = Names(model, processor, header)
    changes = {} if family is None else family.changes(config)
    wanted, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    # By factors in the configuration.
    stretched = "long_factor" in (getattr(config, "rope_parameters", None) or {})
    places: dict[str, Lying] = {}
    found: set[str] = set()  # buffers that were found
    joined: dict[str, dict[int, Place]] = defaultdict(dict)
    for tensor in names.tensors(header):
        place = place_of(path, header, tensor)
        if tensor == FACTORS:
            if header.architecture != "gemma4":  # its configuration has them
                _divide_frequencies(model, whole(place.read()))
            continue
        if names.are_unread(tensor) or (stretched and tensor in (SHORT_FACTORS, LONG_FACTORS)):
            continue
        name, part = names.of(tensor)
        if name is not None and name in buffers:
            _check_shape(tensor, place.shape, buffers[name].shape)
            found.add(name)
            buffers[name].data = as_tensor(floats(whole(place.read())))
        elif name is None or name not in wanted or name in places or part in joined[name]:
            raise ValueError(f"its settings describe no such weights as {tensor}")
        elif part is not None:
            joined[name][part] = place
        else:
            called = alone(tensor)
            change = changes.get(_part_of(called))
            places[name], shape = _converted(place, processor, called) if change is None else _changed(place, change)
            _check_shape(tensor, shape, wanted[name].shape)
    for name, parts in joined.items():
        if not parts:
            continue
        change = changes.get(_part_of(name), Change())
        if (lying := _joined(model, name, wanted[name].shape, parts, change)) is not None:
            places[name] = lying
    needed = wanted.keys() | {name for name in buffers if name.endswith(_CORRECTIONS)}
    if missing := sorted(needed - places.keys() - found):
        raise ValueError(f"weights are missing: {missing[0]}")
    _check_rotation(model, header)
    return model, Reader(model, places, dtype)


def _part_of(name: str) -> str:
    """Return the name of a tensor, or a parameter, within its layer; outside of layers, its whole name."""
    return re.sub(r"^(blk|.*\.layers)\.\d+\.", "", name)


def _joined(
    model: Any, name: str, shape: tuple[int, ...], parts: Mapping[int, Place], change: Change
) -> SideBySide | Below | Heads | None:
    """Return the weights or biases of a parameter that a file has in parts; None if one is missing.

    Args:
        model: the model.
        name: name of the parameter.
        shape: its shape; that of experts begins with their number.
        parts: parts by number.
        change: the order of rows.

    Raises:
        ValueError: if a part has another shape.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if "kv_b_proj" in name:
        if len(parts) < 2:
            return None
        heads = Heads((parts[0], parts[1]))
        _check_shape(heads.parts[0].name, heads.shape, shape)
        return heads
    if name.endswith(".weight"):
        below = Below(tuple(part for _, part in sorted(parts.items())), change.order)
        if len(parts) > 1:
            _check_shape(f"{below.parts[0].name} with {below.parts[1].name}", below.shape, shape)
        return below if len(parts) > 1 else None
    count = 2 if "gate_up_proj" in name else 1
    experts, *each = shape
    other = turned(module) and len(each) > 1
    outputs, *inputs = reversed(each) if other else each
    for place in parts.values():
        _check_shape(place.name, place.shape, (experts, outputs // count, *inputs))
    if len(parts) < count:
        return None
    in_turns = count > 1 and not getattr(module, "is_concatenated", True)
    return SideBySide(tuple(parts[i] for i in range(count)), in_turns, other)


def _check_shape(tensor: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        sizes = f"{tuple(found)} and {tuple(wanted)}"
        raise ValueError(f"the weights do not fit its settings: {tensor} has another shape ({sizes})")


def _converted(place: Place, processor: Any, name: str) -> tuple[Place, tuple[int, ...]]:
    """Return a tensor as transformers' model takes it, and its shape there.

    A sample of numbers shows whether the family's processor reorders rows or does something else.

    Raises:
        ValueError: if the change is unknown.
    """
    rows, columns = place.shape[0], [2] * (len(place.shape) - 1)
    sample = -1 - np.arange(rows * 2 ** len(columns), dtype=np.float32).reshape(rows, *columns)
    made = _processed(processor, name, sample)
    if made.shape == sample.shape:
        order = ((-1 - made.reshape(rows, -1)[:, 0]) // 2 ** len(columns)).astype(np.int64)
        if sorted(order) == list(range(rows)) and np.array_equal(sample[order], made):
            return (place if np.array_equal(sample, made) else place._replace(order=order)), place.shape
    if made.ndim > 2 and np.array_equal(made, sample[None]):  # the file already has it in one row
        return place, place.shape
    for by, changed in CHANGES.items():
        if np.array_equal(changed(sample), made):
            return place._replace(change=by), changed(np.broadcast_to(np.float32(-1), place.shape)).shape
    raise ValueError(f"what its {name} stands for is not understood here; {ELSE}")


def _changed(place: Place, change: Change) -> tuple[Place, tuple[int, ...]]:
    """Return a tensor as transformers' model takes it, and its shape there.

    Raises:
        ValueError: if it has another number of rows or columns than its order.
    """
    orders = []
    for order, size in ((change.order, place.shape[0]), (change.columns, place.shape[-1])):
        if order is not None and len(order) != size:
            raise ValueError(f"the weights do not fit its settings: {place.name} has the shape {place.shape}")
        orders.append(None if order is None or np.array_equal(order, np.arange(size)) else order)
    made = place._replace(order=orders[0], columns=orders[1], change=change.by)
    if change.by is None:
        return made, place.shape
    return made, CHANGES[change.by](np.broadcast_to(np.float32(-1), place.shape)).shape


def _processed(processor: Any, name: str, weights: np.ndarray) -> np.ndarray:
    made: np.ndarray = processor.process(weights, name, tensor_key_mapping={}, parsed_parameters={}).weights
    return made


def _divide_frequencies(model: Any, factors: np.ndarray) -> None:
    """Stretch a rotary embedding like that of Llama 3.1, by the factors in the file.

    Raises:
        ValueError: if the model has none.
    """
    if (rotary := getattr(getattr(model, "model", None), "rotary_emb", None)) is None:
        raise ValueError(f"its settings describe no such weights as {FACTORS}")
    rotary.inv_freq = rotary.inv_freq / as_tensor(factors)
    rotary.original_inv_freq = rotary.inv_freq
    rotary.config.rope_parameters["frequency_factors"] = factors.tolist()


def _check_rotation(model: Any, header: Header) -> None:
    """Refuse a rotary embedding that rotates another part of the heads than the file says.

    Raises:
        ValueError: names both sizes.
    """
    if header.architecture == "gemma4":  # whose configuration is checked per kind of layers
        return
    asked = header.settings.get(f"{header.architecture}.rope.dimension_count")
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    buffers = () if rotary is None or asked is None else rotary.named_buffers()
    for found in {2 * len(buffer) for name, buffer in buffers if name.endswith("inv_freq")}:
        if found != asked:
            raise ValueError(f"its rotary embedding turns {asked} entries of a head, {found} are understood; {ELSE}")


def ends(header: Header, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence: the tokenizer's, those of a turn and a message, and the family's own."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom"))
    found = {tokenizer.eos_token_id, *(header.settings.get(key) for key in keys)}
    if named := _ENDS.get(header.architecture):
        known = tokenizer.get_vocab()
        found |= {known.get(name) for name in named}
    return frozenset(int(i) for i in found if isinstance(i, int))
