"""Prompt look-up: the continuation of the latest earlier occurrence of the last few tokens.

After "prompt lookup decoding" (Saxena, 2023): no model, no cost. A sequence is looked up in its own tokens and, if its
text must have a form, in the texts of other sequences with that form, which have the same names in the same places.
Indexes hold only committed tokens, so nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from detgen.drafters.protocol import Draft, Drafter, Drafting, DraftPlan
from detgen.drafters.registry import Parts

_LONGEST = 3  # length of the n-grams that are looked up; then come shorter ones
MOST_MATCHED = 8  # a longer match predicts no better
_MOST_KEPT = 100_000  # n-grams of a form: some ten megabytes


class _Index:
    """For each n-gram, the tokens in which it occurred last, and the position after it."""

    __slots__ = ("_after", "done")

    def __init__(self) -> None:
        self._after: dict[int | tuple[int, ...], tuple[list[int], int]] = {}
        self.done = 1  # the first position before which it has no n-gram yet, where it is of one sequence

    def add(self, tokens: list[int], start: int, end: int) -> None:
        """Add the n-grams before the positions from `start` up to but not including `end`."""
        if len(self._after) > _MOST_KEPT:
            self._after.clear()
        after = self._after
        before, last = (tokens[at] if at >= 0 else -1 for at in (start - 3, start - 2))
        for at in range(start, end):
            first, before, last = before, last, tokens[at - 1]
            after[last] = after[before, last] = after[first, before, last] = tokens, at

    def match(self, tokens: list[int]) -> tuple[list[int], int, int]:
        """Return where the last few of these tokens occurred: the tokens, the position after them, the match length.

        The length is 0 if there is no match.
        """
        end = len(tokens)
        source, at, matched = tokens, 0, 0
        while matched < min(_LONGEST, end):
            found = self._after.get(tuple(tokens[end - matched - 1 :]) if matched else tokens[-1])
            if found is None:
                return source, at, matched
            (source, at), matched = found, matched + 1
        most = min(at, end, MOST_MATCHED)
        while matched < most and source[at - 1 - matched] == tokens[end - 1 - matched]:
            matched += 1
        return source, at, matched


class NgramDrafter(Drafter):
    """Drafts from the sequence's own prompt and output, and from outputs of the same form."""

    name = "ngram"
    plans = True

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Drafting, _Index] = WeakKeyDictionary()
        self._forms: WeakKeyDictionary[object, _Index] = WeakKeyDictionary()

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i]; none if its last token has not occurred before."""
        return [Draft(self.look_up(seq, n)[0], self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """See `Drafter.plan`; a device looks up as `look_up` does."""
        if not any(lengths):
            return self.draft(seqs, lengths)
        return DraftPlan(self.name, self.name, lengths, lambda seq, draft: None)

    def look_up(self, seq: Drafting, length: int) -> tuple[list[int], int]:
        """Return at most `length` tokens, and the length of the match before them, up to MOST_MATCHED."""
        tokens, end = seq.tokens, len(seq.tokens)
        own = self._indexes.setdefault(seq, _Index())
        start, own.done = own.done, max(end, 1)
        own.add(tokens, start, end)
        source, at, matched = own.match(tokens)
        if seq.structure is not None:
            others = self._forms.setdefault(seq.structure, _Index())
            others.add(tokens, max(start, end - seq.generated), end)
            if (found := others.match(tokens))[2] > matched:
                source, at, matched = found
        if not matched:
            return [], 0
        if source is not tokens:
            return source[at : at + length], matched
        # A continuation shorter than the draft repeats.
        period = end - at
        return [tokens[at + i % period] for i in range(length)], matched


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NgramDrafter()
