"""Which of several ways to draft, or not to, makes the most tokens per second, found out by trying them.

What a pass costs can be predicted, what a round costs beside it hardly. So whole rounds are timed, and the best way is
kept; the others are tried again after a while that grows as long as the verdict stays and is clear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_GUESSED, _FOUND = 2, 8  # rounds until the first try, where the best way is a guess and where it is not
_FEWEST, _MOST = 2, 16  # rounds of a try, which ends as soon as the verdict is clear
_CHANCE = 1.0  # what chance makes of a speed, as a share of it, if it is known from one token
_SOONEST, _LATEST = 8, 512  # rounds until another way is tried
_BETTER = 1.02  # times as fast as the way that is kept: less may be chance
_ALIKE, _WORSE = 0.95, 0.85  # times as fast: not quite sure, and not chance
_FADE = 0.95  # of what earlier rounds count, by the next round
_FORGOTTEN = 0.2  # of it, when a way is tried again


class _Speed:
    """How many times as fast as expected a way is; earlier rounds count less."""

    __slots__ = ("expected", "rounds", "seconds", "tokens")

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = self.expected = self.seconds = 0.0

    def learn(self, tokens: int, seconds: float, expected: float) -> None:
        if self.rounds > 2:  # a pause of the machine counts as twice what was to be expected
            seconds = min(seconds, 2 * expected * self.seconds / self.expected)
        self.rounds += 1
        self._fade(_FADE)
        self.tokens += tokens
        self.expected += expected
        self.seconds += seconds

    def forget(self) -> None:
        self._fade(_FORGOTTEN)

    def _fade(self, kept: float) -> None:
        self.tokens, self.expected, self.seconds = kept * self.tokens, kept * self.expected, kept * self.seconds

    @property
    def value(self) -> float:
        return self.expected / self.seconds if self.seconds else 0.0


class Pace:
    """Chooses the way of each round.

    Args:
        ways: their names.
        best: the one that is kept until another has been found to be faster.
        first: whether `best` is a guess.

    Attributes:
        way: that of the next round.
        best: the one that is kept.
    """

    def __init__(self, ways: Sequence[str], best: str, *, first: bool = True) -> None:
        self.way = self.best = best
        self._speeds = {way: _Speed() for way in ways}
        self._others = [way for way in ways if way != best]  # the next to be tried first
        self._untried = set(self._others)
        self._left = _GUESSED if first else _FOUND  # rounds until the way changes
        self._wait = _SOONEST
        self._more = 0  # rounds by which the try may become longer

    def learn(self, tokens: int, seconds: float, expected: float) -> bool:
        """Take in the round that was last asked for.

        Args:
            tokens: those that it committed.
            seconds: its time.
            expected: about the time that as many tokens take, so that rounds of few sequences and of many compare.

        Returns:
            Whether from now on a way is tried again.
        """
        speeds = self._speeds
        speeds[self.way].learn(tokens, seconds, expected)
        self._left -= 1
        if self._left > 0 or not self._others:
            return False
        if self.way == self.best:
            self.way = self._others.pop(0)
            again = self.way not in self._untried
            self._left, self._more = _FEWEST, _MOST - _FEWEST
            speeds[self.way].forget()
            return again
        ratio = speeds[self.way].value / speeds[self.best].value
        chance = _CHANCE / math.sqrt(speeds[self.way].tokens)
        if self._more > 0 and 1 - chance < ratio < _BETTER + chance:
            self._left, self._more = 1, self._more - 1
        else:
            self._judge(ratio)
        return False

    def give_up(self) -> bool:
        """End a try, if one goes on: the way turned out to be of no use. Returns whether one did."""
        tried = self.way != self.best
        if tried:
            self._judge(0.0)
        return tried

    def _judge(self, ratio: float) -> None:
        """Keep the faster of the way that was tried, so many times as fast, and the best one so far."""
        tried, kept = self.way, self.best
        self._untried.discard(tried)
        if ratio > _BETTER:
            self.best, self._wait = tried, _SOONEST
            self._others.insert(0, kept)  # it is the next to be tried: its first rounds may have been slow by chance
        else:
            self._wait = min(self._wait * (4 if ratio < _WORSE else 2 if ratio < _ALIKE else 1), _LATEST)
            self._others.append(tried)
        self.way = self.best
        self._left = 1 if self._untried else self._wait
