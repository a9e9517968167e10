"""One run: prompts through an engine into an output folder, resumable at any moment.

Knows files and folders, and drives the engine only through `EngineLike`. Torch is not imported before a model has to be
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detgen.engine.engine_like import EngineLike
from detgen.errors import RunError
from detgen.run.interface import RunConfig, RunSummary, ScoreConfig

if TYPE_CHECKING:
    from detgen.run.lifecycle import run

__all__ = ["EngineLike", "RunConfig", "RunError", "RunSummary", "ScoreConfig", "run"]


def __getattr__(name: str) -> Any:
    """Import `run` on first use: the help of the command line needs only the declarations."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from detgen.run.lifecycle import run

    return run
