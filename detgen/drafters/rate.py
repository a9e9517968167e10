"""How often draft tokens are accepted."""

from __future__ import annotations

_WEIGHT = 2.0  # weight of a prior, in tokens tried
_BEFORE = 6.0  # weight of what was known, at most, when it is in doubt
_FADE = 0.995  # of what was known, when something is learnt


class Rate:
    """An acceptance rate in which old tries fade.

    Args:
        prior: what it is assumed to be at first.
    """

    __slots__ = ("hits", "tries")

    def __init__(self, prior: float) -> None:
        self.hits, self.tries = _WEIGHT * prior, _WEIGHT

    def doubt(self) -> None:
        """Let what is learnt next count for more than what is known."""
        kept = min(self.tries, _BEFORE) / self.tries
        self.hits, self.tries = kept * self.hits, kept * self.tries

    def learn(self, hits: int, tries: int) -> None:
        """Take in that `hits` of `tries` tokens were accepted."""
        self.hits = self.hits * _FADE + hits
        self.tries = self.tries * _FADE + tries

    @property
    def value(self) -> float:
        """The rate, within bounds that keep every choice open."""
        return min(max(self.hits / self.tries, 0.02), 0.98)


def expected_accepted(rate: float, length: int) -> float:
    """Expected accepted tokens of a draft: rate + rate**2 + ... + rate**length."""
    return rate * (1 - rate**length) / (1 - rate)
