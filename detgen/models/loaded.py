"""A loaded model, its form kept between runs, and the imports needed to load one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from detgen.errors import DTypeName, QuantName
from detgen.kernels.c.quantizing import MADE, Form
from detgen.kernels.c.threads import use_threads
from detgen.models.description import has_description
from detgen.models.digest import model_digest
from detgen.models.explained import explained
from detgen.models.keeping import Kept, Place
from detgen.models.kept_tokenizer import KeptTokenizer, facts_of
from detgen.models.own_forward import OwnForward
from detgen.models.skeleton import model_of, skeleton_of
from detgen.models.stored import Read, Reader, fill, held
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, import_torch
from detgen.progress import Observer
from detgen.thinking import thinks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from detgen.thinking.modeling import ThinkingStatesForCausalLM

Role = Literal["target", "draft"]

# Forms of linear layers that round their inputs to bf16, by the number format that stands for them.
PAIRED_FORMS: dict[DTypeName, Form] = {"bfloat16": "pairs", "bfloat16-tc25": "tc25", "bfloat16-tc24": "tc24"}
HALVES: dict[DTypeName, np.dtype[Any]] = {**dict.fromkeys(PAIRED_FORMS, BFLOAT16), "float16": FLOAT16}
DTYPES: dict[DTypeName, np.dtype[Any]] = {"float32": FLOAT32, **HALVES}
# Quantizations of the native pass, and their approximate bits per weight.
FORMS: dict[QuantName, Form] = {"q8": "q8", "q4": "q4", "q4_k": "q4_k"}
_BITS = {"q8": 8.5, "q4": 4.5, "q4_k": 4.5}


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
        form: form in which the native pass keeps linear layers: quantized by it, or none for unchanged.
        read: returns the weight of a parameter.
        dtype: number format that was asked for.
        own: results of its own forward, if kept; then `model` only describes the modules and computes nothing.
        keep: keeps these results for the next time; None if they are not to be kept.
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
        """The model, if it thinks."""
        return self.model if thinks(self.model) else None

    @property
    def backbone(self) -> PreTrainedModel:
        """The decoder of a model that thinks; any other model itself."""
        found: PreTrainedModel = self.model if self.thinking is None else self.thinking.backbone
        return found

    @property
    def rounded(self) -> np.dtype[Any] | None:
        """The number format that weights were rounded to when they were read; None for none."""
        return HALVES.get(self.dtype)

    @property
    def packed_form(self) -> Form:
        """Form of linear layers for `panels`: pairs of bf16 if that format was asked for."""
        return PAIRED_FORMS.get(self.dtype, self.form) if self.form == "none" else self.form

    @property
    def packed_bytes(self) -> int:
        """Approximate bytes of its weights once packed."""
        few = _BITS.get(self.form, 0) / 8

        def each(p: nn.Parameter) -> float:
            return few if few and p.ndim > 1 else p.element_size()

        if isinstance(self.read, Reader) and self.form not in MADE:
            return self.read.size
        return int(sum(p.numel() * each(p) for p in self.model.parameters()))

    def whole(self) -> PreTrainedModel:
        """Return the model with its weights in memory, to be run by transformers."""
        if self.read is not held:
            fill(self.model, self.read)
        return self.model


def rule_of(dtype: DTypeName) -> Form | None:
    """Return the rule of tensor cores by which products of a number format are added up; None for none."""
    form = PAIRED_FORMS.get(dtype)
    return None if form == "pairs" else form


def kept_model(
    at: Place,
    path: Path,
    name: str,
    dtype: DTypeName,
    form: Form,
    observer: Observer,
    reading: Callable[[Any, Kept], Read | None],
    load_tokenizer: Callable[[], Any],
) -> LoadedModel | None:
    """Return a model from what was kept; None if nothing is kept for these files.

    Args:
        at: place where it is kept.
        path: folder or file of the model.
        name: its name in messages.
        dtype: number format that is asked for.
        form: form in which the native pass keeps linear layers.
        observer: receives progress.
        reading: returns the reader of its weights; None if that is impossible.
        load_tokenizer: loads transformers' own tokenizer, when something else is asked of it.

    Raises:
        EngineError: if its files cannot be read.
    """
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
        tokenizer = KeptTokenizer(kept.facts["tokenizer"], path, load_tokenizer)
    context, eos = kept.facts["context"], frozenset(kept.facts["eos"])
    return LoadedModel(name, model, tokenizer, digest, context, eos, form, read, dtype, own=kept.own)


def to_be_kept(
    loaded: LoadedModel, at: Place, path: Path, facts: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> LoadedModel:
    """Return the model, set to be kept at a place with these further facts and arrays, if possible."""
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


def torch_for(name: str, observer: Observer) -> None:
    """Import PyTorch, which takes seconds, to load the model of that name."""
    observer.stage("loading PyTorch")
    import_torch()
    use_threads(None)  # also for PyTorch
    observer.stage(f"loading {name}")


def silence() -> None:
    """Silence transformers' progress bars, advice and complaints, which may quote a stranger's file; detgen reports."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\.|torch\.")
