"""The progress of long work, and the observers that receive it. Plain data; imports nothing of detgen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work has come.

    Attributes:
        done: finished parts.
        total: all parts; None if unknown.
        unit: what the parts are, such as "prompts".
        seconds: time passed.
        left: estimated seconds left; None if there is no estimate.
        figures: further figures in words, the most important first.
        tokens: generated or scored tokens; None where there are none to count.
        tokens_per_second: the rate of those tokens; None where there is none.
    """

    done: int
    total: int | None
    unit: str
    seconds: float
    left: float | None = None
    figures: tuple[str, ...] = ()
    tokens: int | None = None
    tokens_per_second: float | None = None


class Observer(Protocol):
    """Receives the progress of a run, a check or a benchmark."""

    def message(self, text: str) -> None:
        """Take a message that deserves a line of its own."""

    def stage(self, text: str) -> None:
        """Take the name of the stage that begins now, such as "loading MODEL"."""

    def progress(self, progress: Progress) -> None:
        """Take the progress of the work; called at every change, shown as often as a person can read."""


class Unobserved:
    """An `Observer` that ignores everything."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def stage(self, text: str) -> None:
        """Do nothing."""

    def progress(self, progress: Progress) -> None:
        """Do nothing."""
