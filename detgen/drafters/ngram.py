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

    def update(self, tokens: list[int], length: int) -> None:
        """Add the n-grams that have a continuation among the first `length` tokens."""
        for end in range(max(self.done, 1), length):
            for n in range(_SHORTEST, _LONGEST + 1):
                if end >= n:
                    self.after[tuple(tokens[end - n : end])] = end
        self.done = length

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """Where the continuation of the tokens that it holds is, and the length of the match; 0 if there is none."""
        end = self.done
        for n in range(min(_LONGEST, end), _SHORTEST - 1, -1):
            at = self.after.get(tuple(tokens[end - n : end]))
            if at is not None:
                most = min(at, MOST_MATCHED)
                while n < most and tokens[at - 1 - n] == tokens[end - 1 - n]:
                    n += 1
                return at, n
        return end, 0


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
        index, tokens = self._index(seq), seq.tokens
        index.update(tokens, len(tokens))
        at, matched = index.match(tokens)
        if not matched:
            return [], 0
        # A continuation shorter than the draft repeats.
        period = len(tokens) - at
        return [tokens[at + i % period] for i in range(length)], matched

    def look_back(self, seq: Drafting, most: int) -> list[tuple[int, bool]]:
        """What it would have drafted for the last generated tokens.

        Args:
            seq: the sequence.
            most: of so many tokens; never of those that it was asked about when they were new.

        Returns:
            Of each token the length of the match that it follows, and whether it is what followed before.
        """
        index, tokens = self._index(seq), seq.tokens
        found = []
        for end in range(max(index.done, len(tokens) - min(most, seq.generated)), len(tokens)):
            index.update(tokens, end)
            at, matched = index.match(tokens)
            found.append((matched, matched > 0 and tokens[at] == tokens[end]))
        return found

    def _index(self, seq: Drafting) -> _Index:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = _Index()
        return index


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NgramDrafter()
