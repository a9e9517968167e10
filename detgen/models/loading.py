"""Loads models and tokenizers with transformers, and checks that they fit together."""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from detgen.errors import DTypeName, EngineError, QuantName
from detgen.kernels.c.quantizing import MADE, Form
from detgen.kernels.c.threads import use_threads
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
from detgen.models.gguf import models as gguf_models
from detgen.models.gguf.header import Header, check_gguf
from detgen.models.gguf.plain import plain_model
from detgen.models.hub import fetched
from detgen.models.keeping import Kept, Place
from detgen.models.kept_tokenizer import KeptTokenizer, facts_of
from detgen.models.latent import expanded_sizes
from detgen.models.merging import Merging
from detgen.models.mxfp4_weights import is_mxfp4
from detgen.models.own_forward import OwnForward
from detgen.models.settings import context_of, ends_of, load_settings
from detgen.models.skeleton import model_of, skeleton_of
from detgen.models.stored import ALL, Read, Reader, Weight, fill, held
from detgen.models.wrappers import auto_class, language_model
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, import_torch, torch_dtype
from detgen.progress import Observer, Unobserved
from detgen.thinking import thinks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from detgen.thinking.modeling import ThinkingStatesForCausalLM

Role = Literal["target", "draft"]

# Forms of linear layers that round their inputs to bf16, by the number format that asks for them.
PAIRED_FORMS: dict[DTypeName, Form] = {"bfloat16": "pairs", "bfloat16-tc25": "tc25", "bfloat16-tc24": "tc24"}
_HALVES: dict[DTypeName, np.dtype[Any]] = {**dict.fromkeys(PAIRED_FORMS, BFLOAT16), "float16": FLOAT16}
DTYPES: dict[DTypeName, np.dtype[Any]] = {"float32": FLOAT32, **_HALVES}

# Number formats of checkpoints whose weights are kept in 16 bits.
_STORED = {frozenset({"BF16"}): BFLOAT16, frozenset({"F16"}): FLOAT16}
# Quantizations by the native pass, and about how many bits a weight takes then.
FORMS: dict[QuantName, Form] = {"q8": "q8", "q4": "q4", "q4_k": "q4_k"}
_BITS = {"q8": 8.5, "q4": 4.5, "q4_k": 4.5}
_ASKING: ContextVar[bool] = ContextVar("asking", default=False)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its tokenizer.

    Attributes:
        name: the folder or hub name it was loaded from; "embedded:target" and "embedded:draft" for the demo models.
        model: the transformers module, in evaluation mode, or a skeleton of it; parameters that are read later have no
            memory.
        tokenizer: its tokenizer.
        digest: SHA-256 over its weights, configuration and tokenizer; of a GGUF file, its own.
        context: most positions of a sequence.
        eos: token ids that end a sequence.
        form: in which the native pass keeps linear layers: quantized by it, or none for as they are.
        read: gives the weight of a parameter.
        dtype: number format that was asked for.
        own: what its own forward has told, if that is kept; then `model` only says what there is, and computes nothing.
        keep: keeps that for the next time; None if it is not to be kept.
        adapter: digest of the adapter that was merged into its weights; None for none.
        adapter_dtype: number format that the merged weights were rounded to; None for no adapter.
        vocabulary: entries of the logits.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    digest: str
    context: int
    eos: frozenset[int]
    form: Form = "none"
    read: Read = held
    dtype: DTypeName = "auto"
    own: OwnForward | None = None
    keep: Callable[[OwnForward], None] | None = None
    adapter: str | None = None
    adapter_dtype: np.dtype[Any] | None = None
    vocabulary: int = field(init=False)

    def __post_init__(self) -> None:
        # Asking the configuration takes microseconds, each time.
        object.__setattr__(self, "vocabulary", int(self.model.config.get_text_config().vocab_size))

    @property
    def thinking(self) -> ThinkingStatesForCausalLM | None:
        """The model, if it is one that thinks."""
        return self.model if thinks(self.model) else None

    @property
    def backbone(self) -> PreTrainedModel:
        """The decoder of a model that thinks; any other model itself."""
        found: PreTrainedModel = self.model if self.thinking is None else self.thinking.backbone
        return found

    @property
    def rounded(self) -> np.dtype[Any] | None:
        """The number format that weights were rounded to when they were read; None for none."""
        return _HALVES.get(self.dtype)

    @property
    def packed_form(self) -> Form:
        """Of linear layers, as `panels` takes it: pairs of bf16 if that format was asked for."""
        return PAIRED_FORMS.get(self.dtype, self.form) if self.form == "none" else self.form

    @property
    def packed_bytes(self) -> int:
        """About what its weights take once they are packed."""
        few = _BITS.get(self.form, 0) / 8

        def each(p: nn.Parameter) -> float:
            return few if few and p.ndim > 1 else p.element_size()

        made = expanded_sizes(self.model)
        more = sum(count * (4 if few else p.element_size()) - p.numel() * each(p) for p, count in made.items())
        if isinstance(self.read, Reader) and self.form not in MADE:
            return int(self.read.size + more)
        return int(sum(p.numel() * each(p) for p in self.model.parameters()) + more)

    def whole(self) -> PreTrainedModel:
        """The model with its weights in memory, for those who run it by transformers."""
        if self.read is not held:
            fill(self.model, self.read)
        return self.model


def rule_of(dtype: DTypeName) -> Form | None:
    """The rule of tensor cores by which a number format has products added up; None for none."""
    form = PAIRED_FORMS.get(dtype)
    return None if form == "pairs" else form


def pick_device(name: str) -> Device:
    """The device of `--device`.

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
    """How many there are for torch, which is not imported to be asked where there is no driver."""
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
    """Load a decoder with transformers, or as it is kept from the last time.

    Args:
        source: folder in the Hugging Face layout, GGUF file, or a hub name.
        name: its name in messages and in the manifest.
        dtype: number format in which weights are kept; auto is the checkpoint's own. The arithmetic's is float32.
        quant: quantization of its linear layers.
        trusted: whether the model's own code may run (`--trust-remote-code`).
        observer: receives progress.
        role: as what it is kept, which is for models that the native pass knows; None keeps nothing.
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
        return _load_gguf(folder, name, dtype, quant, observer, at)
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

    if at is not None and (found := _kept(at, folder, name, dtype, form, observer, reading)):
        kept_in = None if merged is None else _chosen(dtype, stored, quantized=False)
        return replace(found, adapter=merged, adapter_dtype=kept_in)
    _import_torch(name, observer)
    from transformers import AutoModelForCausalLM

    _quiet()
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
        empty = lazy_weights.empty_model(folder, stored, config, chosen)
        lazy = empty is not None and has_description(empty[0])
        if quantized:
            model, read = lazy_weights.quantized_model(folder, stored, config, chosen)
            lazy = has_description(model) and not lazy_weights.looks_at_positions(model)
        elif empty is not None and (lazy or language_model(empty[0]) is not None):
            model, read = empty
        elif auto_class(config) is not AutoModelForCausalLM:
            raise ValueError("this is a multimodal model, and its text part, which alone is read, is not found in it")
        else:
            # Weights of another shape are let through to be named, and refused, by `check_weights`.
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
            raise ValueError(f"{quant} is for decoders that the native pass knows; nf4 and int8 are for others, too")
        if rule_of(dtype) is not None and not (thinks(model) or has_description(model)):
            raise ValueError(f"{dtype} is for decoders that the native pass knows; bfloat16 is for others, too")
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
        loaded = _keeping(loaded, at, folder, {"quantized": quantized}, {})
    return loaded


def _chosen(dtype: DTypeName, stored: Stored, *, quantized: bool) -> np.dtype[Any]:
    """The number format in which weights are read."""
    own: np.dtype[Any] = _STORED.get(stored.dtypes - {"U8", "I8"} if quantized else stored.dtypes, FLOAT32)
    return DTYPES.get(dtype, own)


def _kept(
    at: Place,
    path: Path,
    name: str,
    dtype: DTypeName,
    form: Form,
    observer: Observer,
    reading: Callable[[Any, Kept], Read | None],
) -> LoadedModel | None:
    """A model as it is kept, if these are its files; `reading` gives what reads its weights, if that can be done."""
    kept = at.read()
    if kept is None:
        return None
    with explained(name):
        digest = model_digest(path, observer, trusted=False)
        if kept.facts["digest"] != digest:
            return None
        model = model_of(kept.facts["skeleton"])
        read = reading(model, kept)
        if read is None or not has_description(model):
            return None
        tokenizer = KeptTokenizer(kept.facts["tokenizer"], path, lambda: load_tokenizer(path, name))
    context, eos = kept.facts["context"], frozenset(kept.facts["eos"])
    return LoadedModel(name, model, tokenizer, digest, context, eos, form, read, dtype, own=kept.own)


def _keeping(
    loaded: LoadedModel, at: Place, path: Path, facts: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> LoadedModel:
    """The model, which is to be kept at a place with these facts and arrays besides, if that can be done."""
    skeleton = skeleton_of(loaded.model)
    if skeleton is None:
        return loaded
    facts = facts | {
        **{"digest": loaded.digest, "skeleton": skeleton, "context": loaded.context, "eos": sorted(loaded.eos)}
    }

    def keep(own: OwnForward) -> None:
        tokenizer = facts_of(loaded.tokenizer, path)
        if tokenizer is not None:
            at.write(Kept.of({**facts, "tokenizer": tokenizer}, arrays, own))

    return replace(loaded, keep=keep)


def _load_gguf(
    path: Path, name: str, dtype: DTypeName, quant: QuantName, observer: Observer, at: Place | None
) -> LoadedModel:
    """A model in a GGUF file, whose weights stay as they are stored, unless a format of 16 bits is asked for.

    Arguments and errors as `load_model`.
    """
    header = check_gguf(path, name, quant)
    rounded = _HALVES.get(dtype)

    def reading(model: Any, kept: Kept) -> Read | None:
        return gguf_models.reader_of(model, kept.facts["places"], kept.arrays, header, path, rounded)

    if at is not None:
        found = _kept(at, path, name, dtype, "none", observer, reading)
        if found is None and not _ASKING.get():
            found = _plain_gguf(path, name, dtype, header, observer)
        if found is not None:
            return found
    _import_torch(name, observer)
    _quiet()
    with explained(name):
        config, tokenizer = gguf_models.settings(path, header)
        check_size(path.stat().st_size, config, None, trusted=False)
        model, read = gguf_models.empty_model(config, header, path, rounded)
        model.eval().requires_grad_(False)
        digest = model_digest(path, observer, trusted=False)
    context, eos = context_of(config), gguf_models.ends(header, tokenizer)
    loaded = LoadedModel(name, model, tokenizer, digest, context, eos, read=read, dtype=dtype)
    if at is not None:
        places, orders = gguf_models.kept_places(read)
        loaded = _keeping(loaded, at, path, {"places": places}, orders)
    return loaded


@contextmanager
def asking() -> Iterator[None]:
    """While inside, transformers is asked about GGUF files whose headers say all, too, unless what it told is kept.

    So their packed passes are compared with its forward. What it tells is kept, and later runs compare with that.
    """
    token = _ASKING.set(True)
    try:
        yield
    finally:
        _ASKING.reset(token)


def _plain_gguf(path: Path, name: str, dtype: DTypeName, header: Header, observer: Observer) -> LoadedModel | None:
    """A model whose header says all that there is to know; None of others. Arguments and errors as `load_model`."""
    with explained(name):
        found = plain_model(header, path)
        if found is None:
            return None
        model = model_of(found.skeleton)
        if not has_description(model):
            return None
        read = gguf_models.reader_of(model, found.places, found.orders, header, path, _HALVES.get(dtype))
        tokenizer = KeptTokenizer(found.tokenizer, path, lambda: load_tokenizer(path, name))
        digest = model_digest(path, observer, trusted=False)
    context, eos = context_of(model.config), gguf_models.ends(header, tokenizer)
    return LoadedModel(name, model, tokenizer, digest, context, eos, read=read, dtype=dtype, own=found.own)


def _told(read: Read, model: nn.Module, size: int, observer: Observer) -> Read:
    """Reads as `read` does all weights of a model once, `size` bytes, and tells how far that is."""
    told, done, entries = Told(size, observer), 0, sum(parameter.numel() for parameter in model.parameters())

    def reading(parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        nonlocal done
        weight = read(parameter, rows)
        done += parameter.numel()
        told.tell(size * done / entries)
        return weight

    return reading


def load_tokenizer(source: str | Path, name: str, *, trusted: bool = False, observer: Observer | None = None) -> Any:
    """The tokenizer of a model, without the model; arguments and errors as `load_model`."""
    _quiet()
    place = local_place(source, name) or fetched(str(source), observer or Unobserved(), trusted=trusted)
    if place.is_file():
        header = check_gguf(place, name, "none")
        with explained(name):
            return gguf_models.settings(place, header)[1]
    check_folder(place, name, trusted=trusted)
    return load_settings(place, name, trusted=trusted)[1]


def digest_of(source: str | Path, name: str, *, trusted: bool = False, observer: Observer | None = None) -> str:
    """The digest of a model, without loading it; arguments and errors as `load_model`."""
    observer = observer or Unobserved()
    place = local_place(source, name) or fetched(str(source), observer, trusted=trusted)
    with explained(name):
        return model_digest(place, observer, trusted=trusted)


def adapter_digest_of(adapter: Adapter, observer: Observer) -> str:
    """The digest of an adapter.

    Raises:
        EngineError: a file of it cannot be read.
    """
    with explained(adapter.name):
        return adapter.digest(observer)


def _import_torch(name: str, observer: Observer) -> None:
    """Import PyTorch, which takes seconds, to load a model of that name."""
    observer.stage("loading PyTorch")
    import_torch()
    use_threads(None)  # which it is to have, too
    observer.stage(f"loading {name}")


def _quiet() -> None:
    """Silence transformers' progress bars, advice and complaints, which may quote a stranger's file; detgen reports."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\.|torch\.")
