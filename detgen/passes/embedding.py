"""Breaks a token of a model on purpose, for checks of what its broken rows do to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from detgen.passes.adapter import PlainDecoder
from detgen.passes.lean_decoder import LeanDecoder
from detgen.passes.native_decoder import NativeDecoder


@contextmanager
def broken_embedding(model: PlainDecoder | LeanDecoder | NativeDecoder, token: int) -> Iterator[None]:
    """While the block runs, the embedding of a token is NaN; nothing else of the model changes."""
    if isinstance(model, NativeDecoder):
        model.broken = token
        try:
            yield
        finally:
            model.broken = None
        return
    embedding: Any = model.embed_tokens if isinstance(model, LeanDecoder) else model.model.get_input_embeddings()
    forward = embedding.forward

    def broken(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(ids)
        return found.masked_fill((ids == token)[..., None], torch.nan)

    embedding.forward = broken
    try:
        yield
    finally:
        embedding.__dict__.pop("forward", None)
