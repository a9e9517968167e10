"""All models of families whose GGUF files are read in one way, and files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import gguf_dense, gguf_longrope, gguf_older
from helpers.gguf_models import Model, made_of

TABLES = gguf_dense.MODELS, gguf_longrope.MODELS, gguf_older.MODELS
MODELS: dict[str, Model] = {name: model for table in TABLES for name, model in table.items()}


def made(name: str, *args: Any, **how: Any) -> Path:
    """A GGUF file of a folder of a model; see `made_of`."""
    return made_of(MODELS[name], *args, **how)
