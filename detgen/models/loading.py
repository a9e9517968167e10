"""Loads models and tokenizers with transformers, and checks that they fit together."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.errors import DTypeName, EngineError, QuantName
from detgen.kernels.c.quantizing import MADE
from detgen.machine import CPU, Device
from detgen.models import lazy_weights
from detgen.models.adapter_files import Adapter, check_adapter
from detgen.models.bitsandbytes_weights import QUANTS, Quantizing, is_quantized
from detgen.models.description import has_description
from detgen.models.digest import Told, model_digest
from detgen.models.explained import explained
from detgen.models.fitting import (
    check_memory,
    check_mergeable,
    check_method,
    check_numbers,
    check_size,
    check_unquantized,
    check_weights,
)
from detgen.models.folders import Stored, check_folder, local_place
from detgen.models.gguf.loading import gguf_tokenizer, load_gguf
from detgen.models.hub import fetched
from detgen.models.keeping import Kept, Place
from detgen.models.loaded import (
    DTYPES,
    FORMS,
    PAIRED_FORMS,
    LoadedModel,
    Role,
    kept_model,
    rule_of,
    silence,
    to_be_kept,
    torch_for,
)
from detgen.models.merging import Merging
from detgen.models.mxfp4_weights import is_mxfp4
from detgen.models.settings import context_of, ends_of, load_settings
from detgen.models.stored import ALL, Read, Reader, Weight, fill, held
from detgen.models.wrappers import auto_class, language_model
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, import_torch, torch_dtype
from detgen.progress import Observer, Unobserved
from detgen.thinking import thinks

if TYPE_CHECKING:
    from torch import nn


# Number formats of checkpoints whose weights stay in 16 bits.
_STORED = {frozenset({"BF16"}): BFLOAT16, frozenset({"F16"}): FLOAT16}


def pick_device(name: str) -> Device:
    """Return the device that `--device` names.

    Raises:
        EngineError: if there is no such device here.
    """
    if name == "auto":
        return Device("cuda") if _cuda_devices() else CPU
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (name != kind and not index.isdecimal())):
        raise EngineError(f"no device named {name!r}; use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return CPU
    if not (count := _cuda_devices()):
        raise EngineError(f"device {name!r} was asked for, but torch finds no CUDA device here; use --device cpu")
    if index and int(index) >= count:
        raise EngineError(f"device {name!r} was asked for, but there are {count} CUDA devices")
    return Device(kind, int(index) if index else None)


def _cuda_devices() -> int:
    """Return how many CUDA devices torch sees; without a driver, torch is not even imported."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
    cuda = import_torch().cuda
    return int(cuda.device_count()) if cuda.is_available() else 0


def load_model(
    source: str | Path,
    name: str,
    dtype: DTypeName,
    quant: QuantName,
    *,
    trusted: bool = False,
    observer: Observer | None = None,
    role: Role | None = None,
    adapter: str | Path | None = None,
) -> LoadedModel:
    """Load a decoder with transformers, or from what was kept the last time.

    Args:
        source: folder in the Hugging Face layout, GGUF file, or a hub name.
        name: name in messages and in the manifest.
        dtype: number format in which weights are kept; auto is the checkpoint's own. Arithmetic is in float32.
        quant: quantization of its linear layers.
        trusted: whether the model's own code may run (`--trust-remote-code`).
        observer: receives progress.
        role: role under which to keep it, for models that the native pass knows; None keeps nothing.
        adapter: folder of an adapter that is merged into its weights before they are quantized; None for none.

    Raises:
        EngineError: if there is no such model, it needs code and is not trusted, its files are damaged or do not belong
            together, it does not fit the memory, it is not a decoder, or the adapter cannot be merged.
    """
    observer = observer or Unobserved()
    folder = local_place(source, name) or fetched(str(source), observer, trusted=trusted)
    change = None if adapter is None else check_adapter(adapter, folder)
    merged = None if change is None else adapter_digest_of(change, observer)
    at = Place(folder, role, dtype, quant, merged) if role and not trusted else None
    if folder.is_file():
        observer.stage(f"loading {name}")
        return load_gguf(folder, name, dtype, quant, observer, at)
    stored = check_folder(folder, name, trusted=trusted)
    observer.stage(f"loading {name}")
    form = FORMS.get(quant, "none")

    def reading(model: Any, kept: Kept) -> Read | None:
        quantized: bool = kept.facts["quantized"]
        chosen = _chosen(dtype, stored, quantized=quantized)
        check_memory(model, sum(p.numel() for p in model.parameters()), None if form in MADE or quantized else chosen)
        of = lazy_weights.quantized_reader_of if quantized else lazy_weights.reader_of
        read = of(model, folder, stored, chosen)
        return read if read is None or change is None else Merging(model, read, change)

    def own_tokenizer() -> Any:
        return load_tokenizer(folder, name)

    if at is not None and (found := kept_model(at, folder, name, dtype, form, observer, reading, own_tokenizer)):
        kept_in = None if merged is None else _chosen(dtype, stored, quantized=False)
        return replace(found, adapter=merged, adapter_dtype=kept_in)
    torch_for(name, observer)
    from transformers import AutoModelForCausalLM

    silence()
    config, tokenizer = load_settings(folder, name, trusted=trusted)
    quantized, quantizing = is_quantized(config) or is_mxfp4(config), quant in QUANTS
    check_unquantized(name, quant, config)
    if change is not None:
        check_mergeable(name, change.name, config)
    chosen = _chosen(dtype, stored, quantized=quantized)
    with explained(name, "config.json"):
        check_method(config)
        check_size(stored.size, config, None if form in MADE or quantized or quantizing else chosen, trusted=trusted)
    read: Read = held
    with explained(name):
        check_numbers(stored.tensors, config, trusted=trusted)
        made = lazy_weights.quantized_model if quantized else lazy_weights.empty_model
        empty = made(folder, stored, config, chosen)
        lazy = empty is not None and has_description(empty[0]) and not lazy_weights.looks_at_positions(empty[0])
        if empty is not None and (quantized or lazy or language_model(empty[0]) is not None):
            model, read = empty
        elif auto_class(config) is not AutoModelForCausalLM:
            raise ValueError("this is a multimodal model, and its text part, which alone is read, is not found in it")
        else:
            # Weights of another shape pass here, so that `check_weights` can name and refuse them.
            checks = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, config=config, trust_remote_code=trusted, dtype=torch_dtype(chosen), **checks
            )
            check_weights(loading, model)
        if change is not None:
            with explained(name, change.name):
                read = Merging(model, read, change)
        read = Quantizing(model, read, quant) if quantizing else read
        if read is not held and not lazy:
            check_size(stored.size, config, FLOAT32, trusted=trusted)
            fill(model, _told(read, model, stored.size, observer), FLOAT32)
            read = held
        if form in MADE and not has_description(model):
            raise ValueError(
                f"{quant} needs a model that runs whole in detgen's own pass; nf4 and int8 work with others, too"
            )
        if rule_of(dtype) is not None and not (thinks(model) or has_description(model)):
            raise ValueError(
                f"{dtype} needs a model that runs whole in detgen's own pass; bfloat16 works with others, too"
            )
        if thinks(model):
            check_size(stored.size, config, FLOAT32, trusted=trusted)
            model = model.float() if dtype not in PAIRED_FORMS else model
        model.eval().requires_grad_(False)
        context = context_of(model.config.get_text_config())
        eos = ends_of(model, tokenizer)
        digest = model_digest(folder, observer, trusted=trusted)
    kept_in = None if merged is None else chosen
    about = name, model, tokenizer, digest, context, eos, form, read, dtype
    loaded = LoadedModel(*about, adapter=merged, adapter_dtype=kept_in)
    if at is not None and lazy and isinstance(read, Reader | Merging):
        loaded = to_be_kept(loaded, at, folder, {"quantized": quantized}, {})
    return loaded


def _chosen(dtype: DTypeName, stored: Stored, *, quantized: bool) -> np.dtype[Any]:
    """Return the number format in which weights are read."""
    own: np.dtype[Any] = _STORED.get(stored.dtypes - {"U8", "I8"} if quantized else stored.dtypes, FLOAT32)
    return DTYPES.get(dtype, own)


def _told(read: Read, model: nn.Module, size: int, observer: Observer) -> Read:
    """Wrap `read` so that reading all weights of a model once, `size` bytes, reports progress."""
    told, done, entries = Told(size, observer), 0, sum(parameter.numel() for parameter in model.parameters())

    def reading(parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        nonlocal done
        weight = read(parameter, rows)
        done += parameter.numel()
        told.tell(size * done / entries)
        return weight

    return reading


def load_tokenizer(source: str | Path, name: str, *, trusted: bool = False, observer: Observer | None = None) -> Any:
    """Load the tokenizer of a model without the model; arguments and errors as for `load_model`."""
    place = local_place(source, name) or fetched(str(source), observer or Unobserved(), trusted=trusted)
    if place.is_file():
        return gguf_tokenizer(place, name)
    silence()
    check_folder(place, name, trusted=trusted)
    return load_settings(place, name, trusted=trusted)[1]


def digest_of(source: str | Path, name: str, *, trusted: bool = False, observer: Observer | None = None) -> str:
    """Return the digest of a model without loading it; arguments and errors as for `load_model`."""
    observer = observer or Unobserved()
    place = local_place(source, name) or fetched(str(source), observer, trusted=trusted)
    with explained(name):
        return model_digest(place, observer, trusted=trusted)


def adapter_digest_of(adapter: Adapter, observer: Observer) -> str:
    """Return the digest of an adapter.

    Raises:
        EngineError: if one of its files cannot be read.
    """
    with explained(adapter.name):
        return adapter.digest(observer)
