"""One run: prompts through an engine into an output folder, resumable at any moment.

This package knows files and folders, and drives the engine by its public interface only; torch is not imported before
a model has to be loaded.
"""

from __future__ import annotations

from detgen.errors import RunError
from detgen.run.interface import EngineLike, Observer, Progress, RunConfig, RunSummary
from detgen.run.session import run

__all__ = ["EngineLike", "Observer", "Progress", "RunConfig", "RunError", "RunSummary", "run"]
