"""The n-gram look-up, and how often it is right, by the length of the match that a token follows."""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.protocol import Drafting
from detgen.drafters.rate import Rate

_PRIOR = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.9)  # by the length of the match, from 1
_BACK = 16  # tokens of all sequences that are looked back at


class LookUp:
    """Finds drafts and the chances of their tokens.

    Args:
        ngram: looks them up.
    """

    def __init__(self, ngram: NgramDrafter) -> None:
        self._ngram = ngram
        self._rates = [Rate(prior) for prior in _PRIOR]
        self._matched: dict[int, int] = {}  # by slot, when it was asked last

    def find(self, seq: Drafting, length: int, least: float) -> tuple[list[int], list[float]]:
        """At most `length` tokens, and of each the chance that it and all before it are accepted, down to `least`."""
        tokens, matched = self._ngram.look_up(seq, length)
        self._matched[seq.slot] = matched
        chances: list[float] = []
        chance = 1.0
        for i in range(len(tokens)):
            chance *= self._rate(matched + i).value
            if chance < least:
                break
            chances.append(chance)
        return tokens[: len(chances)], chances

    def look_back(self, seqs: Sequence[Drafting]) -> None:
        """Learn from the last tokens of sequences that were generated without it."""
        most = -(-_BACK // len(seqs))
        for seq in seqs:
            for matched, hit in self._ngram.look_back(seq, most):
                if matched:
                    self._rate(matched).learn(int(hit), 1)

    def learn(self, seq: Drafting, accepted: int, tried: int) -> None:
        """Learn from a draft of the last round."""
        matched = self._matched[seq.slot]
        for i in range(tried):
            self._rate(matched + i).learn(int(i < accepted), 1)

    def _rate(self, matched: int) -> Rate:
        """That of a token after a match of this length; each accepted token makes the match longer by one."""
        return self._rates[min(matched, len(self._rates)) - 1]
