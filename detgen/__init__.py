"""Deterministic batch text generation: the same bytes every time, by verified speculation.

The names below are imported on first use, so that `import detgen` and the command line's help need neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detgen.engine import Engine as Engine
    from detgen.engine.config import EngineConfig
    from detgen.engine.request import Completion, Request
    from detgen.engine.score_requests import Score, ScoreRequest
    from detgen.errors import EngineError, PromptsError, RequestError
    from detgen.llm import LLM, Results
    from detgen.params import SamplingParams

__version__ = "0.1.0"

# OpenMP threads spin while they wait for each other. The default is so long that a run next to another busy process
# takes at least ten times as long, and even a short spin adds up to a second of processor time while a model is packed.
# The variable is read when torch is loaded.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "0"

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "EngineError",
    "PromptsError",
    "Request",
    "RequestError",
    "Results",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "__version__",
]

_HOMES = {
    "LLM": "detgen.llm",
    "Completion": "detgen.engine.request",
    "Engine": "detgen.engine",  # what `LLM` is built on: rounds and traces, for detgen's own code
    "EngineConfig": "detgen.engine.config",
    "EngineError": "detgen.errors",
    "Request": "detgen.engine.request",
    "PromptsError": "detgen.errors",
    "RequestError": "detgen.errors",
    "Results": "detgen.llm",
    "SamplingParams": "detgen.params",
    "Score": "detgen.engine.score_requests",
    "ScoreRequest": "detgen.engine.score_requests",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
