"""Prompt look-up: the continuation of the latest earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.drafters.ngram import MOST_MATCHED, NgramDrafter
from detgen.drafters.protocol import Draft, DraftPlan


def naive(tokens: list[int], length: int) -> list[int]:
    """Search from the end, three tokens first, then two, then one; what follows goes on by repeating itself."""
    for n in (3, 2, 1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[at - n : at] == tokens[-n:]:
                found = tokens[at:]
                while len(found) < length:
                    found = found + found
                return found[:length]
    return []


@examples(80)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    steps=st.lists(st.integers(1, 5), max_size=20),
    length=st.integers(0, 9),
)
def test_equals_a_search(draftable: Callable[..., Any], tokens: list[int], steps: list[int], length: int) -> None:
    """Asked again and again while the sequence grows, the index finds what a search of all tokens finds."""
    drafter = NgramDrafter()
    seq = draftable(0, tokens[:1])
    at = 1
    for step in [*steps, len(tokens)]:
        assert [d.tokens for d in drafter.draft([seq], [length])] == [naive(seq.tokens, length)]
        seq.tokens += tokens[at : at + step]
        at += step
    assert [d.tokens for d in drafter.draft([seq], [length])] == [naive(tokens, length)]


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_length_of_the_match(draftable: Callable[..., Any], tokens: list[int]) -> None:
    """As many tokens before the continuation equal the last ones as it says, and no more up to the most it counts."""
    found, matched = NgramDrafter().look_up(draftable(0, tokens), 1)
    assert bool(found) == bool(matched)
    if found:
        places = [at for at in range(1, len(tokens)) if tokens[at] == found[0]]
        assert any(tokens[max(at - matched, 0) : at] == tokens[-matched:] for at in places)
        longest = min(matched, 3)
        at = max(at for at in range(1, len(tokens)) if tokens[max(at - longest, 0) : at] == tokens[-longest:])
        whole = 0
        while whole < min(at, MOST_MATCHED) and tokens[at - 1 - whole] == tokens[-1 - whole]:
            whole += 1
        assert matched == whole


def test_a_device_looks_up_what_may_be_drafted(draftable: Callable[..., Any]) -> None:
    """Whatever is found now: there may be more after the next token. Where nothing may be drafted, nobody looks."""
    seqs = [draftable(0, [1, 2, 3]), draftable(1, [1, 1])]
    plan = NgramDrafter().plan(seqs, [2, 0])
    assert isinstance(plan, DraftPlan)
    assert (plan.drafter, plan.nothing, plan.counts, plan.runner) == ("ngram", "ngram", [2, 0], None)
    assert NgramDrafter().plan(seqs, [0, 0]) == [Draft([], "ngram")] * 2


def test_sequences_do_not_meet(draftable: Callable[..., Any]) -> None:
    """Each sequence is looked up in its own tokens, with its own length."""
    drafter = NgramDrafter()
    a, b, c = draftable(0, [1, 2, 3, 4, 1, 2]), draftable(1, [1, 2, 9, 9, 1, 2]), draftable(2, [1, 2])
    assert [d.tokens for d in drafter.draft([a, b, c], [2, 3, 5])] == [[3, 4], [9, 9, 1], []]
    assert [d.tokens for d in drafter.draft([b, a], [1, 1])] == [[9], [3]]


def test_a_finished_sequence_is_forgotten(draftable: Callable[..., Any]) -> None:
    """No index outlives its sequence: runs of millions of prompts do not grow."""
    drafter = NgramDrafter()
    for i in range(20):
        drafter.draft([draftable(0, [1, 2, 3, i] * 3)], [2])
    assert len(drafter._indexes) <= 1


def test_texts_of_a_form_meet(draftable: Callable[..., Any]) -> None:
    """What one wrote is drafted for the next, by the longest match; not what prompts and other forms say."""
    drafter, form, other = NgramDrafter(), Form(), Form()
    first = draftable(0, [7, 1, 2, 3, 4, 5, 6], structure=form, generated=6)
    assert drafter.look_up(first, 3) == ([], 0)
    again = draftable(1, [3, 9, 9, 2, 3], structure=form, generated=2)
    assert drafter.look_up(again, 9) == ([4, 5, 6], 2)  # and not [9, 9, 2, 3, ...] after a match of one
    assert drafter.look_up(draftable(2, [2, 3], structure=other, generated=2), 3) == ([], 0)
    assert drafter.look_up(draftable(3, [2, 3], generated=2), 3) == ([], 0)
    assert drafter.look_up(draftable(4, [8, 7], structure=form), 3) == ([1, 2, 3], 1)  # how texts begin
    again.tokens += [5, 6]
    again.generated += 2
    assert drafter.look_up(again, 1) == ([], 0)
    assert drafter.look_up(draftable(5, [2, 3], structure=form, generated=2), 2) == ([5, 6], 2)  # the latest


def test_a_form_is_forgotten_with_its_last_text(draftable: Callable[..., Any]) -> None:
    drafter = NgramDrafter()
    for _ in range(20):
        drafter.look_up(draftable(0, [1, 2, 3], structure=Form(), generated=3), 2)
    assert len(drafter._forms) <= 1


class Form:
    """What a text must be."""
