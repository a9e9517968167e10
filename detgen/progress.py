"""Progress of long work: one observer, one kind of progress. Plain data; imports nothing of detgen."""

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
        left: seconds left; None if there is no telling.
        figures: what else there is to say, in words, the most important first.
    """

    done: int
    total: int | None
    unit: str
    seconds: float
    left: float | None = None
    figures: tuple[str, ...] = ()


class Observer(Protocol):
    """Receives the progress of a run, a check or a benchmark."""

    def message(self, text: str) -> None:
        """Something worth a line of its own."""

    def stage(self, text: str) -> None:
        """What is being done from now on, before there is progress: such as "loading MODEL"."""

    def progress(self, progress: Progress) -> None:
        """How far the work is; called as often as there is news, shown as often as it can be read."""


class Unobserved:
    """An `Observer` that ignores everything."""

    def message(self, text: str) -> None:
        """Ignored."""

    def stage(self, text: str) -> None:
        """Ignored."""

    def progress(self, progress: Progress) -> None:
        """Ignored."""
