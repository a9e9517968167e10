"""Models whose weights are read from their folder when they are packed, so that memory holds them once.

That is for decoders that the native pass takes over, from safetensors files that have their parameters and nothing
else, by their own names, by those that their family had before, or expert by expert; transformers loads, converts or
refuses all others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from detgen.passes import bitsandbytes_weights
from detgen.passes.folders import Stored, Tensor
from detgen.passes.gguf_header import BLOCKS
from detgen.passes.stored import Lying, Place, Reader, Stack, without_weights

# What names in files have in place of what parameters have, by class.
_RENAMED = {"GPTNeoXForCausalLM": ("embed_out.", "lm_head."), "MixtralForCausalLM": (".block_sparse_moe.", ".mlp.")}
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,5})\.(?P<part>\w+)\.weight")
# The parameters that experts' weights are parts of, and which part.
_JOINED = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}


def empty_model(folder: Path, stored: Stored, config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Reader] | None:
    """The model without its weights, and what reads them; None if transformers has to load them.

    Args:
        folder: of the model.
        stored: its weights.
        config: its configuration.
        dtype: in which the weights are wanted.
    """
    names = {tensor.name for tensor in stored.tensors}
    if hasattr(config, "quantization_config") or not names or len(names) != len(stored.tensors):
        return None
    model = without_weights(config, dtype)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # by transformers, too
    unread = {name for name in names - wanted.keys() if any(re.search(pattern, name) for pattern in ignored)}
    tensors = [tensor for tensor in stored.tensors if tensor.name not in unread]
    if not all(map(_plain, tensors)):
        return None
    places = _places(_lying(folder, tensors), _RENAMED.get(type(model).__name__))
    if places is None or wanted != {name: place.shape for name, place in places.items()}:
        return None
    if not type(model).__module__.startswith("transformers.") or looks_at_positions(model):
        return None
    _read_generation(folder, model)
    return model, Reader(model, places, dtype)


def quantized_model(folder: Path, stored: Stored, config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Reader]:
    """The model without its weights, some of which bitsandbytes has quantized, and what reads them.

    Args:
        folder: of the model.
        stored: its weights.
        config: its configuration.
        dtype: which the others get.

    Raises:
        ValueError: if they are not those of the model, or cannot be read; names the tensor.
    """
    if not stored.tensors:
        raise ValueError("weights that bitsandbytes has quantized are read from safetensors files; save it as such")
    model = without_weights(config, dtype)
    few, others = bitsandbytes_weights.places(folder, stored.tensors)
    for tensor in others:
        if not _plain(tensor):
            raise ValueError(f"{tensor.file}: {tensor.name}: nothing says what its numbers mean ({tensor.dtype})")
    found = _places(few | _lying(folder, others), _RENAMED.get(type(model).__name__))
    if found is None:
        raise ValueError("the weights of its experts do not fit together")
    turned = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"weights are missing: {name}")
        kept = shape[::-1] if name in turned and name in few else shape
        if found[name].shape != kept:
            raise ValueError(f"the weights do not fit config.json: {name} is {found[name].shape}, not {kept}")
    ignored = ("rotary_emb.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ()))
    for name in found.keys() - wanted.keys():
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(f"config.json describes no such weights as {name}")
    _read_generation(folder, model)
    return model, Reader(model, found, dtype)


def _read_generation(folder: Path, model: PreTrainedModel) -> None:
    """Read the file whose end-of-sequence tokens count, as transformers does."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _lying(folder: Path, tensors: Sequence[Tensor]) -> dict[str, Lying]:
    """Where tensors of plain numbers lie, by name."""
    return {t.name: Place(folder / t.file, t.dtype, tuple(t.shape), t.at) for t in tensors}


def _places(lying: Mapping[str, Lying], renamed: tuple[str, str] | None) -> dict[str, Lying] | None:
    """Where parameters lie, by name; None if two tensors have one's place, or its parts do not fit together."""
    found: dict[str, Lying] = {}
    parts: dict[str, dict[tuple[int, int], Lying]] = defaultdict(dict)  # by expert and part
    for name, place in lying.items():
        name = name if renamed is None else name.replace(*renamed)
        expert = EXPERT.fullmatch(name)
        if expert is not None and expert["part"] in _JOINED:
            joined, part = _JOINED[expert["part"]]
            parts[f"{expert['experts']}.{joined}"][int(expert["number"]), part] = place
        else:
            found[name] = place
    if len(found) + sum(map(len, parts.values())) < len(lying):
        return None
    for name, of in parts.items():
        experts, each = (1 + max(numbers) for numbers in zip(*of, strict=True))
        places = [tuple(of.get((i, j)) for j in range(each)) for i in range(experts)]
        stack = Stack.of(places)
        if stack is None:
            return None
        found[name] = stack
    return found


def looks_at_positions(model: PreTrainedModel) -> bool:
    """Whether a rotary embedding asks how long its input is, which has no answer before there are weights."""
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = {kind for one in found for kind in (one.values() if isinstance(one, dict) else [one])}
    return bool(kinds & {"dynamic", "longrope"})


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is of numbers that can be taken as they are, and as large as its shape."""
    shape = tensor.shape
    if tensor.dtype not in ("F32", "F16", "BF16") or not isinstance(shape, list) or not shape:
        return False
    return all(type(n) is int for n in shape) and math.prod(shape) * BLOCKS[tensor.dtype][1] == tensor.size
