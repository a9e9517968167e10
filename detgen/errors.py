"""The exceptions of all packages, and the few names that every package needs. Imports nothing of detgen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantName = Literal["none", "nf4", "int8"]

DEMO = Path(__file__).parent / "demo_models"


class EngineError(RuntimeError):
    """An engine that cannot be built as asked; the message names what and the remedy."""


class RequestError(ValueError):
    """A request that cannot run; the message names the reason and, where there is one, the remedy."""


class PromptsError(Exception):
    """An input that cannot be read; the message names it and the remedy."""


class OutputError(Exception):
    """An output folder that cannot be used or written; the message names it and the remedy."""


class RunError(Exception):
    """A run that cannot be made or go on; the message names what and the remedy."""


class CheckError(ValueError):
    """What cannot be checked, audited or replayed; the message names it and the remedy."""


class BenchError(Exception):
    """A benchmark that cannot be made; the message names what and the remedy."""
