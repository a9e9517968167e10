"""Runs one stage in this process: `python -m gpu STAGE MODEL FILE [tiny]`, as started by `running`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from gpu.notebook import Asked, Notebook
from gpu.stages import STAGES

name, model, path, *tiny = sys.argv[1:]
stage = next(stage for stage in STAGES if stage.name == name)
book = Notebook(Path(path))
with book.part(name):
    importlib.import_module(f"gpu.{stage.module}").measure(book, Asked(name, model, bool(tiny)))
sys.exit(bool(book.failed))
