"""Which of several ways to draft, or not to, makes the most tokens per second, found out by trying them.

What a pass costs can be predicted, what a round costs beside it hardly. So whole rounds are timed, and the best way is
kept; the others are tried again after a while that doubles as long as the verdict stays.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST, _TRIED = 6, 2  # rounds of a way's first try, and of later tries
_SOONEST, _LATEST = 16, 512  # rounds until another way is tried
_BETTER = 1.02  # times as fast as the way that is kept: less may be chance
_WORSE = 0.85  # times as fast: not chance
_FADE = 0.95  # of what earlier rounds count, by the next round
_FORGOTTEN = 0.2  # of it, when a way is tried again


class _Speed:
    """Tokens per second of a way; earlier rounds count less."""

    __slots__ = ("rounds", "seconds", "tokens")

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = self.seconds = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        if self.rounds > 2:  # a pause of the machine counts as twice what was expected
            seconds = min(seconds, 2 * tokens * self.seconds / self.tokens)
        self.rounds += 1
        self.tokens, self.seconds = _FADE * self.tokens + tokens, _FADE * self.seconds + seconds

    def fade(self) -> None:
        self.tokens, self.seconds = _FORGOTTEN * self.tokens, _FORGOTTEN * self.seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Pace:
    """Chooses the way of each round.

    Args:
        ways: their names.
        best: the one that is kept until another has been found to be faster.

    Attributes:
        way: that of the next round.
        best: the one that is kept.
    """

    def __init__(self, ways: Sequence[str], best: str) -> None:
        self.way = self.best = best
        self._speeds = {way: _Speed() for way in ways}
        self._others = [way for way in ways if way != best]  # the next to be tried first
        self._left = _FIRST  # rounds until the way changes
        self._wait = _SOONEST

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in the round that was last asked for: the tokens that it committed, and its time."""
        speeds = self._speeds
        speeds[self.way].learn(tokens, seconds)
        self._left -= 1
        if self._left > 0 or not self._others:
            return
        if self.way == self.best:
            self.way = self._others.pop(0)
            self._left = _TRIED if speeds[self.way].rounds else _FIRST
            speeds[self.way].fade()
            return
        tried, kept = self.way, self.best
        ratio = speeds[tried].value / speeds[kept].value
        if ratio > _BETTER:
            self.best, tried, self._wait = tried, kept, _SOONEST
        else:
            self._wait = min(self._wait * (4 if ratio < _WORSE else 2), _LATEST)
        self._others.append(tried)
        self.way = self.best
        self._left = 1 if any(not speeds[way].rounds for way in self._others) else self._wait
