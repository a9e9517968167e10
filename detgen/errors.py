"""The exceptions of all packages, and a few names that every package needs. Imports nothing of detgen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DTypeName = Literal["auto", "float32", "bfloat16", "bfloat16-tc25", "bfloat16-tc24", "float16"]
KVDtypeName = Literal["auto", "float32", "bfloat16"]
QuantName = Literal["none", "q8", "q4", "q4_k", "nf4", "int8"]

DEMO = Path(__file__).parent / "demo_models"


class EngineError(RuntimeError):
    """The engine cannot be built or used as asked; the message gives the reason and the remedy."""


class RequestError(ValueError):
    """The request cannot run; the message gives the reason and, if there is one, the remedy."""


class PromptsError(Exception):
    """The input cannot be read; the message names the input and gives the remedy."""


class OutputError(Exception):
    """The output folder cannot be used or written; the message names the folder and gives the remedy."""


class StoreError(Exception):
    """A store of samples cannot be used; the message names the store and gives the reason and the remedy.

    Attributes:
        damaged: whether the file exists but is damaged or not a store.
    """

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


class RunError(Exception):
    """The run cannot start or continue; the message gives the reason and the remedy."""


class CheckError(ValueError):
    """The check, audit or replay cannot be done; the message gives the reason and the remedy."""


class BenchError(Exception):
    """The benchmark cannot run; the message gives the reason and the remedy."""
