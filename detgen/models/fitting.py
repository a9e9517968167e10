"""Checks that things fit: weights and configuration, requested formats, memory, a target and its draft model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen import thinking
from detgen.errors import EngineError, QuantName
from detgen.models import lazy_weights
from detgen.models.bitsandbytes_weights import is_quantized
from detgen.models.folders import Tensor
from detgen.models.mxfp4_weights import is_mxfp4
from detgen.models.wrappers import auto_class

if TYPE_CHECKING:
    from torch import nn

    from detgen.models.loaded import LoadedModel


def check_method(config: Any) -> None:
    """Raise if weights are quantized in any way but bitsandbytes or MXFP4.

    Raises:
        ValueError: names the method.
    """
    if hasattr(config, "quantization_config") and not is_quantized(config) and not is_mxfp4(config):
        method = dict(config.quantization_config).get("quant_method", "an unknown method")
        raise ValueError(
            f"its weights are quantized by {method}, which is not supported; use the model in float32 or 16 bits"
        )


def check_unquantized(name: str, quant: QuantName, config: Any) -> None:
    """Raise if quantized weights are to be quantized again.

    Raises:
        EngineError: if they are.
    """
    if (is_quantized(config) or is_mxfp4(config)) and quant != "none":
        how = "in MXFP4" if is_mxfp4(config) else "quantized by bitsandbytes"
        raise EngineError(
            f"cannot load the model {name}: its weights are {how}, and cannot be quantized to {quant};"
            " leave out the quantization"
        )


def check_mergeable(name: str, adapter: str, config: Any) -> None:
    """Raise if an adapter is to be merged into quantized weights.

    Raises:
        EngineError: if they are.
    """
    if hasattr(config, "quantization_config"):
        raise EngineError(
            f"cannot merge the adapter {adapter}: the weights of {name} are quantized already; give the model that they"
            " were quantized from as --target, with --target-quant to quantize what is merged"
        )


def check_size(stored: int, config: Any, dtype: Any, *, trusted: bool) -> None:
    """Raise if a configuration needs more memory than there is, or much more than its weights take.

    Raises:
        ValueError: with both sizes.
    """
    import torch

    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trusted)
    elements = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if elements > 8 * stored:  # 2 bits per element, and embeddings that are stored once and used twice
        raise ValueError(f"it describes {elements:,} parameters, and its weights are {stored:,} bytes")
    check_memory(model, elements, dtype)


def check_memory(model: nn.Module, elements: int, dtype: Any) -> None:
    """Raise if the parameters do not fit into memory in a number format; without a format, check nothing.

    Raises:
        ValueError: with both sizes.
    """
    if isinstance(dtype, np.dtype):
        import psutil

        there = psutil.virtual_memory().total + psutil.swap_memory().total
        if elements * dtype.itemsize > there:
            raise ValueError(
                f"its {elements:,} parameters take {elements * dtype.itemsize / 2**30:,.1f} GiB as"
                f" {dtype.name}, and there are {there / 2**30:,.1f} GiB of memory"
            )


def check_numbers(tensors: Sequence[Tensor], config: Any, *, trusted: bool) -> None:
    """Raise if weights of an unquantized model are whole numbers; transformers would convert them.

    Raises:
        ValueError: names the tensor.
    """
    whole = [tensor for tensor in tensors if re.match(r"[IU]\d|BOOL", tensor.dtype)]
    if not whole or hasattr(config, "quantization_config"):
        return
    import torch

    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trusted)
    # Names in a file may be those of the model's base; other tensors, such as masks and positions, may end alike.
    names = {name for name, _ in model.named_parameters()}
    names |= {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
    for tensor in whole:
        if tensor.name in names or lazy_weights.EXPERT.fullmatch(tensor.name):
            raise ValueError(
                f"{tensor.file}: {tensor.name} has whole numbers ({tensor.dtype}), and no model has them there"
            )


def check_weights(loading: dict[str, Any], model: nn.Module) -> None:
    """Raise if the weights are not those of the configuration; transformers would make up the missing ones.

    Raises:
        ValueError: names the first that differs.
    """
    wrong = sorted((str(key[0]), key[1:]) for key in loading.get("mismatched_keys") or ())
    if wrong:
        (name, shapes), more = wrong[0], _and_more(len(wrong))
        sizes = " and ".join(str(tuple(s)) for s in shapes)
        advice = thinking.remedy(name, missing=False)
        raise ValueError(f"the weights do not fit config.json: {name}{more} has another shape ({sizes}){advice}")
    if missing := sorted(loading.get("missing_keys") or ()):
        advice = thinking.remedy(missing[0], missing=True)
        raise ValueError(f"weights are missing: {missing[0]}{_and_more(len(missing))}{advice}")
    if errors := list(loading.get("error_msgs") or ()):
        raise ValueError(f"the weights cannot be read: {str(errors[0]).strip().splitlines()[0]}")
    # Other parts of a checkpoint, such as an image encoder, are left out on purpose; within the layers, nothing may be.
    layers = {re.split(r"\.\d+\.", name)[0] for name, _ in model.named_parameters() if re.search(r"\.\d+\.", name)}
    unused = sorted(k for k in loading.get("unexpected_keys") or () if re.split(r"\.\d+\.", k)[0] in layers)
    if unused:
        raise ValueError(f"config.json describes no such weights as {unused[0]}{_and_more(len(unused))}")


def _and_more(count: int) -> str:
    return f" and {count - 1:,} more" if count > 1 else ""


def check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    """Check that draft and target give each token the same id.

    Raises:
        EngineError: if they do not; names what differs.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    shown = "; ".join(
        f"{json.dumps(t, ensure_ascii=False)}: {ours.get(t, 'absent')} and {theirs.get(t, 'absent')}"
        for t in differing[:3]
    )
    raise EngineError(
        f"the draft model {draft.name} does not share the vocabulary of {target.name}: "
        f"{len(theirs)} tokens and {len(ours)}, {len(differing)} have other ids (target and draft: {shown}). "
        "Use a draft model of the same family, or --drafter ngram"
    )
