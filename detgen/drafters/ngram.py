"""Prompt look-up: the continuation of the latest earlier occurrence of the last few tokens.

After "prompt lookup decoding" (Saxena, 2023): no model, no cost. A sequence's index holds committed tokens only, so
nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts

_LONGEST, _SHORTEST = 3, 1  # lengths of the n-grams that are looked up, longest first
MOST_MATCHED = 8  # a longer match predicts no better


class _Index:
    """Position after the latest occurrence of each n-gram of a sequence, except at its end."""

    __slots__ = ("after", "done")

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self.done = 0

    def update(self, tokens: list[int]) -> None:
        """Add the n-grams that have a continuation by now."""
        for end in range(max(self.done, 1), len(tokens)):
            for n in range(_SHORTEST, _LONGEST + 1):
                if end >= n:
                    self.after[tuple(tokens[end - n : end])] = end
        self.done = len(tokens)


class NgramDrafter:
    """Drafts from the sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Drafting, _Index] = WeakKeyDictionary()

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; none if its last token has not occurred before."""
        return [Draft(self.look_up(seq, n)[0], self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def look_up(self, seq: Drafting, length: int) -> tuple[list[int], int]:
        """`length` tokens, or none, and the length of the match that they follow, up to MOST_MATCHED."""
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = _Index()
        tokens = seq.tokens
        index.update(tokens)
        for n in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            at = index.after.get(tuple(tokens[-n:]))
            if at is not None:
                most = min(at, MOST_MATCHED)
                while n < most and tokens[at - 1 - n] == tokens[-1 - n]:
                    n += 1
                # A continuation shorter than the draft repeats.
                period = len(tokens) - at
                return [tokens[at + i % period] for i in range(length)], n
        return [], 0


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NgramDrafter()
