"""Which of several ways to draft makes the most tokens per second, found out by trying them.

What a pass costs can be predicted, what a round costs beside it hardly. So whole rounds are timed, and the best way is
kept; the others are tried again after a while that grows as long as the verdict stays and is clear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from detgen.drafters.speed import Speed

# In steps, which are about as many as the tokens that a sequence gets: rounds with drafts make several.
_FIRST = 8  # until the first try
_FEWEST, _MOST = 4, 16  # of a try, which ends as soon as the verdict is clear
_SOONEST, _LATEST = 8, 512  # until a way is tried again
_CHANCE = 1.0  # what chance makes of a speed, as a share of it, if it is known from one token
_BETTER = 1.02  # times as fast as the way that is kept: less may be chance
_WORSE = 0.85  # times as fast: that is not chance
_FADE = 0.998  # of what earlier rounds count, by each further token
# Likewise, for the way that is kept alone; and the tokens after which it may be seen that the texts have changed.
_LATELY, _SEEN = 0.97, 16
_FORGOTTEN = 0.5  # of it, when a way is tried again


class Pace:
    """Chooses the way of each round.

    Args:
        ways: their names.
        best: the one that is kept until another has been found to be faster.

    Attributes:
        way: that of the next round.
        best: the one that is kept.
        begins: whether the next round is the first of a try.
    """

    def __init__(self, ways: Sequence[str], best: str) -> None:
        self.way = self.best = best
        self.begins = False
        self._speeds = {way: Speed(_FADE) for way in ways}
        self._lately = Speed(_LATELY)  # of the best way
        self._steps = 0.0  # of the best way, since the beginning
        self._waits = dict.fromkeys(ways, float(_SOONEST))
        self._due = {way: float(_FIRST) for way in ways if way != best}  # the step at which each way is tried
        self._tried = 0.0  # steps of the try

    def learn(self, tokens: float, seconds: float, expected: float, steps: float) -> None:
        """Take in the round that was last asked for.

        Args:
            tokens: those that it committed.
            seconds: its time.
            expected: about the time that as many tokens take, so that rounds of few sequences and of many compare.
            steps: tokens of each sequence, about.
        """
        speeds = self._speeds
        speeds[self.way].learn(tokens, seconds, expected)
        self.begins = False
        if self.way == self.best:
            self._steps += steps
            self._lately.learn(tokens, seconds, expected)
            self._doubt()
            self._try_what_is_due()
            return
        self._tried += steps
        ratio = speeds[self.way].value / speeds[self.best].value
        chance = _CHANCE / math.sqrt(speeds[self.way].tokens)
        unsure = 1 - chance < ratio < _BETTER + chance
        if self._tried >= (_MOST if unsure else _FEWEST):
            self._judge(ratio)

    def give_up(self) -> None:
        """End a try, if one goes on: the way turned out to be of no use."""
        if self.way != self.best:
            self._judge(0.0)

    def put_off(self) -> None:
        """Let a try that begins begin later."""
        self._due[self.way] = self._steps + _SOONEST
        self.way, self.begins = self.best, False

    def _doubt(self) -> None:
        """Let ways be tried now if the best one has become slower than they were, as it does where texts change."""
        lately = self._lately
        faster = [way for way in self._due if lately.value < _WORSE * self._speeds[way].value]
        if faster and lately.tokens > _SEEN:
            self._speeds[self.best].become(lately)
            self._lately = Speed(_LATELY)
            for way in faster:
                self._due[way] = self._steps

    def _try_what_is_due(self) -> None:
        way = min(self._due, key=self._due.__getitem__, default=self.best)
        if way != self.best and self._due[way] <= self._steps:
            self.way, self.begins = way, True
            self._tried = 0.0
            self._speeds[way].fade(_FORGOTTEN)

    def _judge(self, ratio: float) -> None:
        """Keep the faster of the way that was tried, so many times as fast, and the best one so far."""
        tried, kept = self.way, self.best
        del self._due[tried]
        if ratio > _BETTER:
            self.best, again = tried, kept  # its first rounds may have been slow by chance
            self._lately = Speed(_LATELY)
            self._waits[kept] = max(self._waits[kept] / 4, _SOONEST)
        else:  # of two that are alike, it hardly matters which is kept
            again = tried
            self._waits[tried] = min(self._waits[tried] * (4 if ratio < _WORSE else 2), _LATEST)
        self._due[again] = self._steps + self._waits[again]
        self.way, self.begins = self.best, False
