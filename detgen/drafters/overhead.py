"""What a round takes beside its passes and beside what its draft was expected to take."""

from __future__ import annotations

_MOST = 2e-3  # seconds of a round; more is a pause of the machine
_NEW = 0.1  # weight of a round, after the first ones, which count alike
_DOUBT = 0.97  # of what is known, when it was why nobody drafted
# What rounds with drafts take, as a multiple of what those without do: for any, and more for each sequence.
_AT_FIRST, _EACH = 1.25, 0.125


class Overhead:
    """Seconds of rounds with drafts and without, for a number of sequences.

    As long as nobody has drafted, rounds with drafts are assumed to take a multiple of the others.
    """

    __slots__ = ("_rounds", "_seconds")

    def __init__(self) -> None:
        self._seconds, self._rounds = [0.0, 0.0], [0, 0]

    def learn(self, seconds: float, *, drafting: bool) -> None:
        """Take in a round."""
        self._rounds[drafting] += 1
        new = max(_NEW, 1 / self._rounds[drafting])
        self._seconds[drafting] += new * (min(max(seconds, 0.0), _MOST) - self._seconds[drafting])

    def doubt(self) -> None:
        """Let rounds with drafts seem a little quicker, so that they are tried again some time."""
        self._seconds[True] *= _DOUBT

    def drafting(self, sequences: int) -> float:
        """Those of a round with drafts, of so many sequences."""
        return self._seconds[True] if self._rounds[True] else self._seconds[False] * (_AT_FIRST + _EACH * sequences)
