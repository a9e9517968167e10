"""Load models from GGUF files: from what was kept, by their headers alone, or with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from detgen.errors import DTypeName, QuantName
from detgen.models.description import has_description
from detgen.models.digest import model_digest
from detgen.models.explained import explained
from detgen.models.fitting import check_size
from detgen.models.gguf import models
from detgen.models.gguf.header import Header, check_gguf
from detgen.models.gguf.places import kept_places, reader_of
from detgen.models.gguf.plain import plain_model
from detgen.models.keeping import Kept, Place
from detgen.models.kept_tokenizer import KeptTokenizer
from detgen.models.loaded import HALVES, LoadedModel, kept_model, silence, to_be_kept, torch_for
from detgen.models.settings import context_of
from detgen.models.skeleton import model_of
from detgen.models.stored import Read
from detgen.progress import Observer

_ASKING: ContextVar[bool] = ContextVar("asking", default=False)


def load_gguf(
    path: Path, name: str, dtype: DTypeName, quant: QuantName, observer: Observer, at: Place | None
) -> LoadedModel:
    """Load a model from a GGUF file; weights stay as stored unless a format of 16 bits is asked for.

    Arguments and errors as for `load_model`.
    """
    header = check_gguf(path, name, quant)
    rounded = HALVES.get(dtype)

    def reading(model: Any, kept: Kept) -> Read | None:
        return reader_of(model, kept.facts["places"], kept.arrays, header, path, rounded)

    if at is not None:
        found = kept_model(at, path, name, dtype, "none", observer, reading, lambda: gguf_tokenizer(path, name))
        if found is None and not _ASKING.get():
            found = _plain(path, name, dtype, header, observer)
        if found is not None:
            return found
    torch_for(name, observer)
    silence()
    with explained(name):
        config, tokenizer = models.settings(path, header)
        check_size(path.stat().st_size, config, None, trusted=False)
        model, read = models.empty_model(config, header, path, rounded)
        model.eval().requires_grad_(False)
        digest = model_digest(path, observer, trusted=False)
    context, eos = context_of(config), models.ends(header, tokenizer)
    loaded = LoadedModel(name, model, tokenizer, digest, context, eos, read=read, dtype=dtype)
    if at is not None:
        places, orders = kept_places(read)
        loaded = to_be_kept(loaded, at, path, {"places": places}, orders)
    return loaded


def gguf_tokenizer(path: Path, name: str) -> Any:
    """Load the tokenizer of a GGUF file as transformers does; arguments and errors as for `load_model`."""
    header = check_gguf(path, name, "none")
    silence()
    with explained(name):
        return models.settings(path, header)[1]


@contextmanager
def asking() -> Iterator[None]:
    """Inside the block, ask transformers even about GGUF files whose headers say everything, unless answers are kept.

    Their packed passes are thus compared with its forward. Its answers are kept, and later runs compare with them.
    """
    token = _ASKING.set(True)
    try:
        yield
    finally:
        _ASKING.reset(token)


def _plain(path: Path, name: str, dtype: DTypeName, header: Header, observer: Observer) -> LoadedModel | None:
    """Load a model whose header says everything; None for others. Arguments and errors as for `load_model`."""
    with explained(name):
        found = plain_model(header, path)
        if found is None:
            return None
        model = model_of(found.skeleton)
        if not has_description(model):
            return None
        read = reader_of(model, found.places, found.orders, header, path, HALVES.get(dtype))
        tokenizer = KeptTokenizer(found.tokenizer, path, lambda: gguf_tokenizer(path, name))
        digest = model_digest(path, observer, trusted=False)
    context, eos = context_of(model.config), models.ends(header, tokenizer)
    return LoadedModel(name, model, tokenizer, digest, context, eos, read=read, dtype=dtype, own=found.own)
