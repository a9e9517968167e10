"""What is known of rounds: of those without drafts, of those with drafts, by the number of sequences."""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.overhead import Overhead
from detgen.drafters.pace import Pace
from detgen.drafters.speed import Speed

_STEADY = 0.95  # of what is known, by each further token of a sequence
_STALE = 0.001  # rounds without drafts may have become as much faster, for each token of a sequence since the last
_DOUBT = 0.01  # that rounds with drafts may have become faster by, each time that nobody drafts for what is known


class Rounds:
    """What is known of rounds of about so many sequences.

    Args:
        ways: see `Pace`.
        like: rounds of other numbers of sequences, to begin with; None if nothing is known.

    Attributes:
        pace: whether the draft model drafts.
        overhead: what rounds with drafts take beside what is predicted.
        kept: how many times as fast as promised rounds are for which the look-up drafts.
    """

    def __init__(self, ways: Sequence[str], like: Rounds | None = None) -> None:
        self.pace: Pace = Pace(ways, like.pace.best if like is not None else ways[-1])
        self.overhead = Overhead()
        self.kept = Speed(_STEADY)
        self._plain = Speed(_STEADY)  # of rounds without drafts
        self._since = 0.0  # tokens of each sequence since the last of these
        if like is not None:
            self.overhead.become(like.overhead)
            self.kept.become(like.kept)
            self._plain.become(like._plain)

    @property
    def known(self) -> bool:
        """Whether it is known how fast rounds without drafts are."""
        return self._plain.rounds > 0

    @property
    def plain(self) -> float:
        """How many times as fast as predicted rounds without drafts are, at best."""
        return self._plain.value * (1 + _STALE * self._since)

    def learn_plain(self, tokens: float, seconds: float, expected: float, sequences: int) -> None:
        """Take in rounds without drafts.

        Args:
            tokens: of all sequences.
            seconds: their time.
            expected: as the passes without drafts were predicted.
            sequences: how many there were.
        """
        self._plain.learn(tokens / sequences, seconds, expected)
        self._since = 0.0
        self.pace.learn(tokens, seconds, expected, tokens / sequences)

    def learn_drafted(self, tokens: float, seconds: float, expected: float, sequences: int) -> None:
        """Take in a round with drafts; see above."""
        self._since += tokens / sequences
        self.pace.learn(tokens, seconds, expected, tokens / sequences)

    def doubt(self) -> None:
        """Let drafts seem a little better: nobody drafted, but only because such rounds were slower than promised."""
        self.kept.doubt(_DOUBT)
        self.overhead.doubt()


class RoundsBySize:
    """Rounds by the magnitude of their number of sequences.

    Args:
        ways: see `Pace`.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        self._ways = ways
        self._rounds: dict[int, Rounds] = {}
        self._last: Rounds | None = None

    def of(self, count: int) -> Rounds:
        """Those of about so many sequences; at first they are like the last ones of which something was known."""
        magnitude = count.bit_length()
        rounds = self._rounds.get(magnitude)
        if rounds is None or not rounds.known:
            rounds = self._rounds[magnitude] = Rounds(self._ways, self._last)
        if rounds.known:
            self._last = rounds
        return rounds
