"""What a form forces, in front of another drafter: each drafts and learns of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from detgen.drafters.grammar import GrammarDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting


class Noting(Drafter):
    """Drafts sevens, and notes what it is asked and told."""

    name, draft_tokens, while_reading = "noting", 5, False

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.told: list[Any] = []

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        self.asked.append(lengths)
        return [Draft([7] * n, self.name) for n in lengths]

    def idle(self) -> bool:
        return not self.asked

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        self.told.append((drafter, accepted, tried))

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        self.told.append((steps, seconds, sequences))


@pytest.fixture
def other() -> Noting:
    return Noting()


def test_the_other_drafts_where_nothing_is_forced(other: Noting, draftable: Callable[..., Any]) -> None:
    drafter = GrammarDrafter(other, "auto")
    seqs = [draftable(0, [1], must=[4, 5, 6]), draftable(1, [2])]
    assert drafter.draft(seqs, [2, 3]) == [Draft([4, 5], "grammar"), Draft([7, 7, 7], "noting")]
    assert other.asked == [[0, 3]]


def test_it_is_in_all_else_the_other(other: Noting) -> None:
    drafter = GrammarDrafter(other, "auto")
    assert (drafter.name, drafter.draft_tokens, drafter.while_reading) == ("auto", 5, False)
    assert drafter.idle()
    drafter.draft([], [])
    assert not drafter.idle()


def test_the_other_learns_of_its_own(other: Noting, draftable: Callable[..., Any]) -> None:
    """A round in which something was forced tells it that time went by, and no more; the next one is its own again."""
    drafter = GrammarDrafter(other, "auto")
    drafter.draft([draftable(0, [1], must=[4]), draftable(1, [2])], [2, 2])
    drafter.learn(draftable(0, [1]), "grammar", 1, 1)
    drafter.learn(draftable(1, [2]), "noting", 0, 2)
    drafter.timed(2.0, 0.5, 2)
    drafter.timed(4.0, 0.25, 2)  # it was not asked in between
    assert other.told == [("noting", 0, 2), (2.0, 0.5, 0), (4.0, 0.25, 2)]
