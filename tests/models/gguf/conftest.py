"""Folders of models, and loading as a run does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_alike import MODELS
from helpers.gguf_files import plain_tokenizer

from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model


@pytest.fixture(scope="session")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    """Folders of the models of `helpers/gguf_alike.py`, made on first use."""
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name].config())))


@pytest.fixture
def quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], LoadedModel]:
    """Loads a model as a run does; nothing is kept of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load(path: Path, dtype: Any = "auto") -> LoadedModel:
        found = load_model(path, path.name, dtype, "none", role="target")
        assert found.own is not None
        return found

    return load
