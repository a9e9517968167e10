"""Prompt look-up: the continuation of the latest earlier occurrence of the last few tokens.

After "prompt lookup decoding" (Saxena, 2023): no model, no cost. A sequence's index holds committed tokens only, so
nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts

_LONGEST = 3  # length of the n-grams that are looked up; then come shorter ones
MOST_MATCHED = 8  # a longer match predicts no better


class _Index:
    """Position after the latest occurrence of each n-gram of a sequence, except at its end."""

    __slots__ = ("after", "done")

    def __init__(self) -> None:
        self.after: dict[int | tuple[int, ...], int] = {}
        self.done = 0

    def update(self, tokens: list[int], length: int) -> None:
        """Add the n-grams that have a continuation among the first `length` tokens."""
        after, start = self.after, max(self.done, 1)
        before, last = (tokens[at] if at >= 0 else -1 for at in (start - 3, start - 2))
        for end in range(start, length):
            first, before, last = before, last, tokens[end - 1]
            after[last] = after[before, last] = after[first, before, last] = end
        self.done = length

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """Where the continuation of the tokens that it holds is, and the length of the match; 0 if there is none."""
        end = at = self.done
        matched = 0
        while matched < min(_LONGEST, end):
            found = self.after.get(tuple(tokens[end - matched - 1 : end]) if matched else tokens[end - 1])
            if found is None:
                return at, matched
            at, matched = found, matched + 1
        most = min(at, MOST_MATCHED)
        while matched < most and tokens[at - 1 - matched] == tokens[end - 1 - matched]:
            matched += 1
        return at, matched


class NgramDrafter(Drafter):
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

    def _index(self, seq: Drafting) -> _Index:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = _Index()
        return index


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NgramDrafter()
