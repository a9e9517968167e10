"""Kernels that are broken on purpose: a module of detgen's with some of its text replaced."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType


def broken(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The module with each text replaced wherever it stands; it is written to the folder, where Triton reads it."""
    text = inspect.getsource(module)
    for old, new in changes:
        assert old in text, f"{module.__name__} has no {old!r}"
        text = text.replace(old, new)
    path = folder / f"broken_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
