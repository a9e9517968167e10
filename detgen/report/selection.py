"""Which requests are shown window by window: those that are asked for, or three that rules choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from detgen.report.counting import least_margins, longest_accepted, thrown_away
from detgen.report.log import Entries, Key
from detgen.report.streaming import Fields


@dataclass(slots=True)
class Chosen:
    """A sample to be shown, and why.

    Attributes:
        key: whose it is.
        why: the rules that chose it, in words.
        records: its entries in the acceptance log.
    """

    key: Key
    why: list[str] = field(default_factory=list)
    records: list[Fields] = field(default_factory=list)


_FIRST = ("the first of the run", "the second of the run", "the third of the run")  # as many as are shown

_Score = Callable[[Entries], np.ndarray]


@dataclass(slots=True)
class _Rule:
    """Prefers the sample with the highest score, and of equal ones the first."""

    why: str
    score: _Score
    best: float
    chosen: Chosen | None = None

    def see(self, entries: Entries) -> None:
        scores = self.score(entries)
        at = int(scores.argmax())
        if scores[at] > self.best:
            self.best = float(scores[at])
            self.chosen = Chosen(entries.key(at), [self.why], entries.of_sample(at))


def _closeness(entries: Entries) -> np.ndarray:
    """The higher, the closer the closest tie."""
    found: np.ndarray = -np.nan_to_num(least_margins(entries), nan=np.inf)
    return found


class Choosing:
    """Sees the acceptance log once, and keeps the entries of the samples that are to be shown.

    Args:
        asked: keys that are asked for; if there are any, no rule chooses.
        thoughtful: the sample of a thinking model with the most thoughts; None if there is none.
    """

    def __init__(self, asked: list[Key], thoughtful: Key | None = None) -> None:
        self._asked = {key: Chosen(key, ["asked for by its id"]) for key in asked}
        self._thoughtful = Chosen(thoughtful, ["the one with the most thoughts"]) if thoughtful else None
        self._first: list[Chosen] = []
        self._rules = [
            _Rule("the one with the most tokens thrown away", thrown_away, 0),
            _Rule("the one with the closest tie", _closeness, -np.inf),
            _Rule("the one with the most drafted tokens accepted in one round", longest_accepted, 1),
        ]

    def see(self, entries: Entries) -> None:
        """Look at the entries of some samples."""
        wanted = dict(self._asked)
        if not self._asked:
            for number, why in enumerate(_FIRST[len(self._first) :][: len(entries.samples)]):
                self._first.append(Chosen(entries.key(number), [why], entries.of_sample(number)))
            for rule in self._rules:
                rule.see(entries)
            if self._thoughtful is not None:
                wanted[self._thoughtful.key] = self._thoughtful
        for number, key in enumerate(entries.keys() if wanted else ()):
            if (chosen := wanted.get(key)) is not None:
                chosen.records = entries.of_sample(number)

    def chosen(self) -> list[Chosen]:
        """The samples to be shown: as asked, or the first three in the order of the rules, each once."""
        if self._asked:
            return list(self._asked.values())
        found: dict[Key, Chosen] = {}
        for one in (self._thoughtful, *self._first[:1], *(rule.chosen for rule in self._rules), *self._first[1:]):
            if one is not None:
                found.setdefault(one.key, Chosen(one.key, [], one.records)).why.extend(one.why)
        return list(found.values())[: len(_FIRST)]
