"""Progress of long work: an observer, and what it receives. Plain data; imports nothing of detgen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is.

    Attributes:
        done: finished parts.
        total: all parts; None if not known.
        unit: what the parts are, such as "prompts".
        seconds: time passed.
        left: seconds left; None if that cannot be told.
        figures: what else there is to say, in words, the most important first.
        tokens: generated or scored tokens; None where there are none to count.
        tokens_per_second: of them.
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
        """Take the name of what begins now, such as "loading MODEL"."""

    def progress(self, progress: Progress) -> None:
        """Take how far the work is; called at every change, shown as often as a person can read."""


class Unobserved:
    """An `Observer` that ignores everything."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def stage(self, text: str) -> None:
        """Do nothing."""

    def progress(self, progress: Progress) -> None:
        """Do nothing."""
