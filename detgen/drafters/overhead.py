"""What a round takes beside its passes and beside what its draft was expected to take."""

from __future__ import annotations

_MOST = 2e-3  # seconds of a round; more is a pause of the machine
_NEW = 0.1  # weight of a round, after the first ones, which count alike
_DOUBT = 0.97  # of what is known, when it was why nobody drafted


class Overhead:
    """Seconds of rounds with drafts.

    Attributes:
        seconds: of a round; 0 before the first one.
    """

    __slots__ = ("_rounds", "seconds")

    def __init__(self) -> None:
        self.seconds, self._rounds = 0.0, 0

    def learn(self, seconds: float) -> None:
        """Take in a round."""
        self._rounds += 1
        new = max(_NEW, 1 / self._rounds)
        self.seconds += new * (min(max(seconds, 0.0), _MOST) - self.seconds)

    def become(self, other: Overhead) -> None:
        """Know what another one does, but for how often it was so."""
        self.seconds, self._rounds = other.seconds, min(other._rounds, 1)

    def doubt(self) -> None:
        """Let rounds with drafts seem a little quicker, so that they are tried again some time."""
        self.seconds *= _DOUBT
