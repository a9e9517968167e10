"""Models whose weights are read from their folder when they are packed, so that memory holds them once.

That is for decoders that the native pass takes over, from safetensors files that have their parameters by their own
names and nothing else; transformers loads, converts or refuses all others.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from detgen.passes.folders import Stored, Tensor
from detgen.passes.gguf_header import BLOCKS
from detgen.passes.stored import Place, Reader, without_weights


def empty_model(folder: Path, stored: Stored, config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Reader] | None:
    """The model without its weights, and what reads them; None if transformers has to load them.

    Args:
        folder: of the model.
        stored: its weights.
        config: its configuration.
        dtype: in which the weights are wanted: that of the files, or float32.
    """
    tensors = {tensor.name: tensor for tensor in stored.tensors}
    if hasattr(config, "quantization_config") or not tensors or len(tensors) != len(stored.tensors):
        return None
    if not all(map(_plain, stored.tensors)):
        return None
    model = without_weights(config, dtype)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if wanted != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        return None
    if not type(model).__module__.startswith("transformers.") or _looks_at_positions(model):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    places = {t.name: Place(folder / t.file, t.dtype, tuple(t.shape), t.at) for t in stored.tensors}
    return model, Reader(model, places, wide=dtype == torch.float32)


def _looks_at_positions(model: PreTrainedModel) -> bool:
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
