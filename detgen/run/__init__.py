"""One run: prompts through an engine into an output folder, resumable at any moment.

Knows files and folders, and drives the engine through `EngineLike` only. Torch is not imported before a model has to be
loaded.
"""

from __future__ import annotations

from detgen.errors import RunError
from detgen.run.interface import EngineLike, RunConfig, RunSummary, ScoreConfig
from detgen.run.lifecycle import run

__all__ = ["EngineLike", "RunConfig", "RunError", "RunSummary", "ScoreConfig", "run"]
