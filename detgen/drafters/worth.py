"""What the tokens of a round are worth: not the same where some sequences get more of them than others do."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NEAR = 4.0  # tokens: of sequences that differ by many times as much, the end waits for the one that has more left


class Worth:
    """Of tokens while requests wait, and when none does any more.

    A request that waits takes the place of a sequence that ends, so all tokens are worth the same. Where none waits,
    the end waits for the sequences that have the most left: what is worth something is how far the greatest number of
    tokens left goes down, in its smooth form, a log-sum-exp.

    Args:
        left: the most tokens that each sequence may still get; None while requests wait.
    """

    __slots__ = ("_sum", "_weights")

    def __init__(self, left: Sequence[int] | None) -> None:
        self._weights: list[float] | None = None
        if left is not None and len(left) > 1:
            most = max(left)
            self._weights = [math.exp((n - most) / _NEAR) for n in left]
            self._sum = sum(self._weights)

    def tokens(self, gains: Sequence[float]) -> float:
        """The tokens that all sequences get if each gets gains[i], at what they are worth."""
        weights = self._weights
        if weights is None:
            return sum(gains)
        rest = sum([weight * math.exp(-gain / _NEAR) for weight, gain in zip(weights, gains, strict=True)])
        return -_NEAR * math.log(rest / self._sum) * len(gains)
