"""Models without weights: the weights are read from the model's folder while they are packed.

So memory holds a model only once. This works for models that become programs, from safetensors files with exactly their
parameters, by their own names, by the former names of their family, or expert by expert; transformers loads, converts
or refuses all others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models import bitsandbytes_weights, mxfp4_weights
from detgen.models.folders import Stored, Tensor
from detgen.models.gguf.kinds import NAMED
from detgen.models.stored import Lying, Place, Reader, Stack, turned, whole, without_weights
from detgen.models.wrappers import is_made, is_read_here_alone, of_text, renaming, without_towers
from detgen.program import arrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of names in files, and what parameters have in their place, by class.
_RENAMED = {
    "GPTNeoXForCausalLM": ("embed_out.", "lm_head."),
    "NemotronHForCausalLM": ("backbone.", "model."),
    "MixtralForCausalLM": (".block_sparse_moe.", ".mlp."),
}
OF_MASKS = r"\.masked_bias$"  # buffers that modules of GPT Neo, GPT-J and GPT-2 once had: a number for hidden positions
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,5})\.(?P<part>\w+)\.weight")
# The parameter that contains an expert's weight, and which part of it the weight is.
_JOINED = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}


def empty_model(
    folder: Path, stored: Stored, config: Any, dtype: np.dtype[Any]
) -> tuple[PreTrainedModel, Reader] | None:
    """Return the model without its weights, and their reader; None if transformers has to load them.

    Args:
        folder: folder of the model.
        stored: its weights.
        config: its configuration.
        dtype: number format for the weights.
    """
    if hasattr(config, "quantization_config") or not stored.tensors:
        return None
    model = without_weights(config, dtype)
    if not type(model).__module__.startswith("transformers."):
        return None
    reader = reader_of(model, folder, stored, dtype)
    if reader is None:
        return None
    _read_generation(folder, model)
    return model, reader


def reader_of(model: Any, folder: Path, stored: Stored, dtype: np.dtype[Any]) -> Reader | None:
    """Return the reader of a model whose parameters have no memory; None if transformers has to load it."""
    try:
        found = _read_buffers(model, folder, _of_text(model, stored.tensors), dtype)
    except ValueError:
        return None
    names = {tensor.name for tensor in found}
    if len(names) != len(found):
        return None
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ignored = (OF_MASKS, *(model._keys_to_ignore_on_load_unexpected or ()))  # by transformers, too
    unread = {name for name in names - wanted.keys() if any(re.search(pattern, name) for pattern in ignored)}
    tensors = [tensor for tensor in found if tensor.name not in unread]
    if not all(map(_plain, tensors)):
        return None
    places = _places(_lying(folder, tensors), _RENAMED.get(type(model).__name__))
    if places is not None and is_read_here_alone(model) and (missing := sorted(wanted.keys() - places.keys())):
        if is_made(model, missing[0]):
            raise ValueError(f"transformers makes {missing[0]} of other weights, which detgen does not do here yet")
        raise ValueError(f"weights are missing: {missing[0]}")
    if places is None or wanted != {name: place.shape for name, place in places.items()}:
        return None
    return Reader(model, places, dtype)


def quantized_model(folder: Path, stored: Stored, config: Any, dtype: np.dtype[Any]) -> tuple[PreTrainedModel, Reader]:
    """Return the model without its weights, some of which are in MXFP4 or quantized by bitsandbytes, and their reader.

    Args:
        folder: folder of the model.
        stored: its weights.
        config: its configuration.
        dtype: number format for the other weights.

    Raises:
        ValueError: if they do not fit the model, or cannot be read; names the tensor.
    """
    if not stored.tensors:
        raise ValueError("weights that are quantized are read from safetensors files; save it as such")
    model = without_weights(config, dtype)
    reader = quantized_reader_of(model, folder, stored, dtype)
    _read_generation(folder, model)
    return model, reader


def quantized_reader_of(model: Any, folder: Path, stored: Stored, dtype: np.dtype[Any]) -> Reader:
    """Return the reader of such a model whose parameters have no memory; errors as for `quantized_model`."""
    of = mxfp4_weights if mxfp4_weights.are_there(stored.tensors) else bitsandbytes_weights
    few, others = of.places(folder, _read_buffers(model, folder, _of_text(model, stored.tensors), dtype))
    for tensor in others:
        if not _plain(tensor):
            raise ValueError(f"{tensor.file}: {tensor.name}: nothing says what its numbers mean ({tensor.dtype})")
    found = _places(few | _lying(folder, others), _RENAMED.get(type(model).__name__))
    if found is None:
        raise ValueError("the weights of its experts do not fit together")
    modules = {name: module for name, module in model.named_modules() if turned(module)}
    other_way = {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters()}
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"weights are missing: {name}")
        kept = (*shape[:-2], *shape[:-3:-1]) if name in other_way and name in few else shape
        if found[name].shape != kept:
            raise ValueError(f"the weights do not fit config.json: {name} is {found[name].shape}, not {kept}")
    ignored = ("rotary_emb.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ()))
    for name in found.keys() - wanted.keys():
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(f"config.json describes no such weights as {name}")
    return Reader(model, found, dtype)


def _read_buffers(
    model: PreTrainedModel, folder: Path, tensors: Sequence[Tensor], dtype: np.dtype[Any]
) -> list[Tensor]:
    """Read a model's buffers in place, as transformers does; return the remaining tensors.

    Tensors of buffers that are computed are left out, too.

    Raises:
        ValueError: if one is missing or does not fit; names it.
    """
    buffers, renamed = dict(model.named_buffers()), _RENAMED.get(type(model).__name__)
    names = [tensor.name if renamed is None else tensor.name.replace(*renamed) for tensor in tensors]
    named = dict(zip(names, tensors, strict=True))
    in_32_bits = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name in buffers.keys() & model.state_dict().keys():
        tensor = named.get(name)
        if tensor is None or tuple(tensor.shape) != tuple(buffers[name].shape) or not _plain(tensor):
            raise ValueError(f"weights are missing, or do not fit config.json: {name}")
        numbers = whole(Place(folder / tensor.file, tensor.dtype, tuple(tensor.shape), tensor.at).read())
        if not any(part in name for part in in_32_bits):
            with np.errstate(over="ignore"):  # numbers that are too large become infinite
                numbers = numbers.astype(dtype)
        buffers[name].data = arrays.tensor(arrays.floats(numbers))
    return [tensor for name, tensor in zip(names, tensors, strict=True) if name not in buffers]


def _of_text(model: PreTrainedModel, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors under the model's names; for a multimodal model without towers, only those of the text model."""
    renamed = renaming(model)
    found = [tensor._replace(name=renamed(tensor.name)) for tensor in tensors]
    left = of_text([tensor.name for tensor in found], without_towers(model))
    return [tensor for tensor in found if tensor.name in left]


def _read_generation(folder: Path, model: PreTrainedModel) -> None:
    """Read the file whose end-of-sequence tokens are used, as transformers does."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _lying(folder: Path, tensors: Sequence[Tensor]) -> dict[str, Lying]:
    """Return the places of tensors of plain numbers, by name."""
    return {t.name: Place(folder / t.file, t.dtype, tuple(t.shape), t.at) for t in tensors}


def _places(lying: Mapping[str, Lying], renamed: tuple[str, str] | None) -> dict[str, Lying] | None:
    """Return the places of parameters by name; None if two tensors have the same one, or parts do not fit together."""
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
    """Return whether a rotary embedding depends on the length of its input, which is unknown without weights."""
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = {kind for one in found for kind in (one.values() if isinstance(one, dict) else [one])}
    return bool(kinds & {"dynamic", "longrope"})


def _plain(tensor: Tensor) -> bool:
    """Return whether a tensor has plain numbers, and the size of its shape."""
    shape = tensor.shape
    if tensor.dtype not in ("F32", "F16", "BF16") or not isinstance(shape, list) or not shape:
        return False
    return all(type(n) is int for n in shape) and math.prod(shape) * NAMED[tensor.dtype].size == tensor.size
