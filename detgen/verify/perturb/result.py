"""What a check compares and what it found. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from detgen.engine.request import Request
from detgen.verify.perturb.axes import Setting, Value, name_value
from detgen.verify.perturb.generation_digests import Difference, Tally


@dataclass(frozen=True, slots=True)
class Case:
    """A setting and the requests that are compared under it."""

    setting: Setting
    watched: list[Request]


@dataclass(frozen=True, slots=True)
class Failure:
    """A case in which something differs.

    Attributes:
        case: the case.
        difference: the first difference.
        error: the error that was raised, if that is the difference.
    """

    case: Case
    difference: Difference
    error: str | None = None


@dataclass(slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        total: counts over all settings.
        tried: the settings that were tried, each with its counts.
        failures: the first few settings that differ.
        kills: runs that were killed and resumed.
        preemptions: sequences that were preempted and replayed.
        seconds: time taken.
        pairs: number of selected pairwise settings; 0 if axes were changed alone.
        selected: settings that were to be tried, except random ones.
        done: how many of these were tried.
        notes: what could not be tried and why.
    """

    total: Tally = field(default_factory=Tally)
    tried: list[tuple[Setting, Tally]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kills: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    pairs: int = 0
    selected: list[Setting] = field(default_factory=list)
    done: int = 0
    notes: list[str] = field(default_factory=list)

    def of_axis(self, name: str, values: tuple[Value, ...]) -> tuple[list[str], Tally | None]:
        """Return the names of an axis' values that were tried, and the counts under values other than the first."""
        seen = {getattr(setting, name) for setting, _ in self.tried}
        found, others = Tally(), False
        for setting, tally in self.tried:
            if getattr(setting, name) != values[0]:
                found.add(tally)
                others = True
        return [name_value(name, v) for v in values if v in seen], found if others else None
