"""The look-up says how likely its tokens are, and learns that from tokens that it did not draft, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from detgen.drafters.look_up import LookUp
from detgen.drafters.ngram import NgramDrafter

LEAST = 1e-9


def test_chances_go_down_and_end_the_draft(draftable: Callable[..., Any]) -> None:
    seq = draftable(0, [1, 2, 3, 4] * 4)
    tokens, chances = LookUp(NgramDrafter()).find(seq, 8, LEAST)
    assert tokens == [1, 2, 3, 4, 1, 2, 3, 4]
    assert chances == sorted(chances, reverse=True)
    few, likely = LookUp(NgramDrafter()).find(seq, 8, chances[2])
    assert few == tokens[:3]
    assert likely == chances[:3]


def test_no_match_no_draft(draftable: Callable[..., Any]) -> None:
    assert LookUp(NgramDrafter()).find(draftable(0, [1, 2, 3]), 8, LEAST) == ([], [])


def test_long_matches_are_trusted_more(draftable: Callable[..., Any]) -> None:
    """What is learnt of matches of one token says nothing of long ones."""
    look_up = LookUp(NgramDrafter())
    short, long = draftable(0, [7, 1, 8, 1]), draftable(1, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2)
    for _ in range(100):
        look_up.find(short, 8, LEAST)
        look_up.find(long, 8, LEAST)
        look_up.learn(short, 0, 1)
        look_up.learn(long, 8, 8)
    assert look_up.find(short, 8, LEAST)[1][0] < 0.1
    assert look_up.find(long, 8, LEAST)[1][7] > 0.8


@pytest.mark.parametrize("repeats", [True, False])
def test_it_learns_from_what_it_did_not_draft(draftable: Callable[..., Any], repeats: bool) -> None:
    """After a 0, there stands what stood there before, or never."""
    look_up, seqs = LookUp(NgramDrafter()), [draftable(slot, [0, 1]) for slot in range(4)]
    for step in range(50):
        for seq in seqs:
            seq.tokens += [1000 + step, 0, 1 if repeats else 2000 + step]
            seq.generated += 3
        look_up.look_back(seqs)
    (chance,) = look_up.find(draftable(5, [0, 1, 0]), 1, LEAST)[1]
    assert chance > 0.8 if repeats else chance < 0.1


def test_it_looks_back_at_few_tokens_in_all(draftable: Callable[..., Any]) -> None:
    class Counting(NgramDrafter):
        """Counts the tokens that are looked back at."""

        looked = 0

        def look_back(self, seq: Any, most: int) -> list[tuple[int, bool]]:
            found = super().look_back(seq, most)
            self.looked += len(found)
            return found

    ngram = Counting()
    LookUp(ngram).look_back([draftable(slot, [1] * 100, generated=90) for slot in range(8)])
    assert ngram.looked == 16
