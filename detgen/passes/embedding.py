"""Breaks a token of a model on purpose, for checks of what its broken rows do to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from detgen.passes.adapter import PlainDecoder
from detgen.passes.forward import Decoder


@contextmanager
def broken_embedding(model: Decoder, token: int) -> Iterator[None]:
    """While the block runs, the embedding of a token is NaN; nothing else of the model changes."""
    if not isinstance(model, nn.Module):
        model.broken = token
        try:
            yield
        finally:
            model.broken = None
        return
    embedding: Any = model.model.get_input_embeddings() if isinstance(model, PlainDecoder) else model.embed_tokens
    forward = embedding.forward

    def broken(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(ids)
        return found.masked_fill((ids == token)[..., None], torch.nan)

    embedding.forward = broken
    try:
        yield
    finally:
        embedding.__dict__.pop("forward", None)
