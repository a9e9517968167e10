"""The verdict on a window, and what the acceptance log makes of it."""

from __future__ import annotations

import numpy as np
from helpers.examples import examples
from helpers.records import count_records
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.records import NONE
from detgen.engine.request import Request
from detgen.engine.sequence import Sequence
from detgen.engine.verification import judge, record, verify
from detgen.params import SamplingParams


def never(_: list[int]) -> bool:
    return False


def test_the_figure() -> None:
    """T1' T2' T3' are drafted, T1 agrees, T2 does not: T1 and the verifier's T2 stand, T3' is rolled back."""
    t1, t2, t2_drafted, t3_drafted, t3, t4 = range(1, 7)
    verdict = verify([t1, t2_drafted, t3_drafted], [t1, t2, t3, t4], never)
    assert verdict.tokens == [t1, t2]
    assert verdict.statuses == ["accepted", "corrected"]
    assert verdict.rolled_back == [t3_drafted]


def test_all_match() -> None:
    """If every drafted token agrees, the verifier's next one is committed too and nothing rolls back."""
    verdict = verify([1, 2, 3], [1, 2, 3, 4], never)
    assert verdict.tokens == [1, 2, 3, 4]
    assert verdict.statuses == ["accepted"] * 3 + ["bonus"]
    assert verdict.rolled_back == []


def test_no_draft_is_plain_decoding() -> None:
    verdict = verify([], [9], never)
    assert (verdict.tokens, verdict.statuses, verdict.rolled_back) == ([9], ["plain"], [])


def test_an_end_inside_the_draft() -> None:
    """Nothing stands behind a token that ends the sequence, agreeing drafts included."""
    verdict = verify([1, 2, 3], [1, 2, 3, 4], lambda tokens: tokens[-1] == 2)
    assert (verdict.tokens, verdict.statuses, verdict.rolled_back) == ([1, 2], ["accepted"] * 2, [3])


TOKENS = st.integers(0, 3)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    drafted = draw(st.lists(TOKENS, max_size=6))
    return drafted, draw(st.lists(TOKENS, min_size=len(drafted) + 1, max_size=len(drafted) + 1))


@examples(80)
@given(both=rounds(), last=st.one_of(st.none(), TOKENS))
def test_equals_one_token_at_a_time(both: tuple[list[int], list[int]], last: int | None) -> None:
    """Committed is what decoding step by step commits while the draft predicts it, and one token more."""
    drafted, chosen = both
    asked: list[int] = []

    def ends(tokens: list[int]) -> bool:
        asked.append(tokens[-1])
        assert tokens == asked
        return tokens[-1] == last

    verdict = verify(drafted, chosen, ends)
    want: list[int] = []
    for token in chosen:
        want.append(token)
        if token == last or len(want) > len(drafted) or drafted[len(want) - 1] != token:
            break
    assert verdict.tokens == want
    assert asked == want, "asked once for each committed token, in order"
    assert verdict.rolled_back == drafted[len(want) :]
    for i, (token, status) in enumerate(zip(verdict.tokens, verdict.statuses, strict=True)):
        if status == "accepted":
            assert drafted[i] == token
        elif status == "corrected":
            assert drafted[i] != token
            assert i == len(want) - 1
        else:
            assert i == len(drafted)
            assert status == ("bonus" if drafted else "plain")


@examples(50)
@given(some=st.lists(st.tuples(rounds(), st.sampled_from(["model", "ngram"])), min_size=1, max_size=8))
def test_the_log_is_complete(some: list[tuple[tuple[list[int], list[int]], str]]) -> None:
    """Committed tokens in order are the sequence's; each drafted token is accepted, corrected or rolled back."""
    request = Request(0, 0, token_ids=(5, 5), params=SamplingParams())
    seq = Sequence(request, 0, [5, 5], 2, 1000)
    drafts = 0
    for (drafted, chosen), name in some:
        verdict = verify(drafted, chosen, never)
        n = len(verdict.tokens)
        margins = [float(t) or None for t in verdict.tokens]
        record(seq, verdict, drafted, name if drafted else "none", [-0.5] * n, margins)
        drafts += len(drafted)
    committed = [r for r in seq.records if r.token is not None]
    assert [r.token for r in committed] == seq.tokens[2:]
    assert [r.position for r in committed] == list(range(seq.generated))
    assert [r.round for r in seq.records] == sorted(r.round for r in seq.records)
    assert seq.rounds == len(some)
    for r in seq.records:
        assert (r.token is None) == (r.status == "rolled_back") == (r.logprob is None)
        assert (r.drafted is None) == (r.status in ("bonus", "plain"))
        assert r.margin == (None if not r.token else float(r.token))
    counts = count_records(seq.records)
    for c in counts.values():
        assert c.drafted == c.accepted + c.corrected + c.rolled_back
    assert sum(c.rounds for c in counts.values()) == len(some)
    assert sum(c.drafted for c in counts.values()) == drafts
    assert sum(c.accepted + c.corrected + c.bonus + c.plain for c in counts.values()) == seq.generated


def test_running_acceptance() -> None:
    """Accepted over tried; old rounds fade."""
    seq = Sequence(Request(0, 0, token_ids=(1,)), 0, [1], 1, 100)
    seq.learn("model", 1, 2)
    assert seq.acceptance == {"model": (1.0, 2.0)}
    seq.learn("model", 1, 1)
    hits, tries = seq.acceptance["model"]
    assert 1.0 < hits < 2.0
    assert 2.0 < tries < 3.0


@examples(150)
@given(some=st.lists(st.tuples(rounds(), st.one_of(st.none(), TOKENS)), min_size=1, max_size=6))
def test_all_windows_at_once(some: list[tuple[tuple[list[int], list[int]], int | None]]) -> None:
    """The arrays say of each window what `verify` says of it alone, whatever the others are."""
    firsts, drafted, chosen, ends = [], [], [], []
    for (draft, choices), last in some:
        firsts.append(len(chosen))
        drafted += [*draft, NONE]
        chosen += choices
        ends += [token == last for token in choices]
    found = judge(np.array(firsts), np.array(drafted), np.array(chosen), np.array(ends))
    for i, ((draft, choices), last) in enumerate(some):
        want = verify(draft, choices, lambda tokens, last=last: tokens[-1] == last)  # type: ignore[misc]
        assert (found.accepted[i], found.committed[i]) == (want.accepted, len(want.tokens))
