"""How fast rounds of a kind are."""

from __future__ import annotations

_PAUSE = 2.0  # times as long as was to be expected; what takes longer is a pause of the machine


class Speed:
    """How many times as fast as expected rounds are; earlier ones count less.

    Args:
        fading: what earlier rounds count, by each further token.

    Attributes:
        rounds: how many were taken in.
        tokens: of all rounds, as far as they count.
        seconds: likewise.
        expected: seconds that were expected, likewise.
    """

    __slots__ = ("_fading", "expected", "rounds", "seconds", "tokens")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self.rounds = 0
        self.tokens = self.expected = self.seconds = 0.0

    def learn(self, tokens: float, seconds: float, expected: float) -> None:
        """Take in a round of so many tokens, its seconds, and those that were expected."""
        if self.rounds > 2:
            seconds = min(seconds, _PAUSE * expected * self.seconds / self.expected)
        self.rounds += 1
        self.fade(self._fading**tokens)
        self.tokens += tokens
        self.expected += expected
        self.seconds += seconds

    def become(self, other: Speed) -> None:
        """Know what another one does, and no more."""
        self.rounds, self.seconds = other.rounds, other.seconds
        self.tokens, self.expected = other.tokens, other.expected

    def fade(self, kept: float) -> None:
        """Let what is known count less."""
        self.tokens, self.expected, self.seconds = kept * self.tokens, kept * self.expected, kept * self.seconds

    def doubt(self, share: float) -> None:
        """Seem so much faster, if that is no faster than expected."""
        self.expected = max(min((1 + share) * self.expected, self.seconds), self.expected)

    @property
    def value(self) -> float:
        """Times as fast as expected; 0 before the first round."""
        return self.expected / self.seconds if self.seconds else 0.0
