"""The automatic drafter: within its limits always, and sensible where the case is clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detgen.drafters.auto import AutoDrafter
from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.pace import Pace
from detgen.drafters.protocol import Draft
from detgen.passes.cost import PassCost


def line(fixed: float, row: float) -> PassCost:
    cost = PassCost()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        cost.update(rows, fixed + row * rows)
    return cost


def make(
    passes: Any, target: PassCost, draft: PassCost | None, draft_tokens: int | None = None, most_rows: int = 128
) -> AutoDrafter:
    model = None
    if draft is not None:
        passes.cost = draft
        model = ModelDrafter(passes, 50, 10_000)
        for slot in range(8):
            model.start(slot, [], 0)
    auto = AutoDrafter(NgramDrafter(), model, target, most_rows, draft_tokens)
    auto._pace = Pace(auto._ways, auto._ways[0])  # as if it had found that drafts are worth it
    return auto


SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 14)), min_size=1, max_size=8
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=SEQUENCES,
    fixed=st.floats(0, 0.1),
    row=st.floats(0, 0.01),
    draft=st.one_of(st.none(), st.floats(1e-5, 0.1)),
    draft_tokens=st.one_of(st.none(), st.integers(1, 8)),
    learnt=st.lists(st.tuples(st.sampled_from(["model", "ngram", "none"]), st.integers(0, 4)), max_size=6),
)
def test_within_limits(
    predictable: Any,
    draftable: Callable[..., Any],
    some: list[tuple[list[int], int]],
    fixed: float,
    row: float,
    draft: float | None,
    draft_tokens: int | None,
    learnt: list[tuple[str, int]],
) -> None:
    """Never more than asked for, and each draft is what the drafter named beside it would write."""
    predictable.entries.clear()
    auto = make(predictable, line(fixed, row), None if draft is None else line(draft, draft / 10), draft_tokens)
    seqs = [draftable(i, tokens) for i, (tokens, _) in enumerate(some)]
    lengths = [n for _, n in some]
    auto.draft(seqs, lengths)
    for name, accepted in learnt:
        auto.learn(seqs[0], name, accepted, 4)
    looked_up = NgramDrafter().draft(seqs, lengths)
    for seq, n, (found, name), (other, _) in zip(seqs, lengths, auto.draft(seqs, lengths), looked_up, strict=True):
        assert len(found) <= n
        assert draft_tokens is None or len(found) <= draft_tokens
        assert (name == "none") == (not found)
        assert name in ("none", "ngram") or draft is not None
        if name == "ngram":
            assert found == other[: len(found)]
        elif name == "model":
            assert found == seq.wanted(len(found))


def test_a_useless_draft_model_is_left_alone(predictable: Any, draftable: Callable[..., Any]) -> None:
    """If nothing is ever accepted, soon nothing is drafted."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    for _ in range(200):
        auto.learn(seq, "model", 0, 4)
    assert auto.draft([seq], [8]) == [Draft([], "none")]
    assert predictable.passes == []


def test_a_draft_model_that_nobody_knows_is_tried(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Few sequences have to be read by it, and a token each is enough; what the rounds cost says nothing yet."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    seqs = [draftable(slot, [1, 2, 3 + slot]) for slot in range(8)]
    for _ in range(2):
        drafts = auto.draft(seqs, [8] * 8)
        tried = [seq for seq, draft in zip(seqs, drafts, strict=True) if draft.drafter == "model"]
        assert [len(draft.tokens) for draft in drafts if draft.tokens] == [1, 1, 1, 1]
        auto.timed(8, 100.0)
        for seq in tried:
            auto.learn(seq, "model", 0, 1)
    assert auto._pace.way == "model"
    assert auto.draft(seqs, [8] * 8) == [Draft([], "none")] * 8  # it is known to be of no use
    auto.timed(8, 0.02)
    assert {seq.slot for seq in tried} == {0, 1, 2, 3}  # those that it had read before


def test_what_is_of_no_use_is_given_up_at_once(predictable: Any, draftable: Callable[..., Any]) -> None:
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    auto._pace = Pace(auto._ways, "none")
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    auto.learn(seq, "model", 0, 40)
    ways = []
    for _ in range(6):
        auto.draft([seq], [8])
        ways.append(auto._pace.way)
        auto.timed(1, 0.01)
    assert ways == ["none", "none", "model", "none", "ngram", "ngram"]
    assert predictable.passes == []


def test_what_was_best_and_is_of_no_use_is_left(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Its rounds count, though nobody drafts in them, so the others are tried again."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    auto.learn(seq, "model", 0, 40)
    assert auto._pace.best == "model"
    for _ in range(20):
        auto.draft([seq], [8])
        auto.timed(1, 0.02 if auto._pace.way == "model" else 0.01)
    assert auto._pace.best != "model"


def test_matches_of_unknown_worth_are_tried_by_few(predictable: Any, draftable: Callable[..., Any]) -> None:
    auto = make(predictable, line(0.05, 0.0), None)
    seqs = [draftable(slot, [1, 2, 3, 1, 2]) for slot in range(8)]
    assert sum(draft.drafter == "ngram" for draft in auto.draft(seqs, [8] * 8)) == 4
    for _ in range(8):
        auto.learn(seqs[0], "ngram", 1, 1)
    assert all(draft.drafter == "ngram" for draft in auto.draft(seqs, [8] * 8))


def test_a_good_and_cheap_draft_model_is_used(predictable: Any, draftable: Callable[..., Any]) -> None:
    """If nearly everything is accepted and the draft costs little, drafts are long."""
    auto = make(predictable, line(0.05, 0.0001), line(0.001, 0.0))
    seq = draftable(0, [1, 2, 3], {"model": (20.0, 20.0)})
    for _ in range(200):
        auto.learn(seq, "model", 4, 4)
    (draft,) = auto.draft([seq], [8])
    assert draft.drafter == "model"
    assert len(draft.tokens) >= 6


def test_the_fastest_way_is_kept(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where rounds without drafts make more tokens per second, nobody drafts, until another way has become faster."""
    auto = make(predictable, line(0.05, 0.0001), line(0.001, 0.0))
    seq = draftable(0, [1, 2, 3], {"model": (20.0, 20.0)})
    auto.learn(seq, "model", 8, 8)

    def rounds(count: int, with_model: float) -> list[str]:
        """The drafters of so many rounds of a second, where those of the model give so many tokens, and others 100."""
        found = []
        for _ in range(count):
            found.append(auto.draft([seq], [8])[0].drafter)
            if found[-1] == "model":
                auto.learn(seq, "model", 1, 1)
            auto.timed(round(with_model) if found[-1] == "model" else 100, 1.0)
        return found

    assert rounds(1, 60) == ["model"]
    rounds(100, 60)
    kept = rounds(400, 60)
    assert kept.count("none") > 380
    rounds(1500, 140)
    assert rounds(400, 140).count("model") > 380


def test_rows_that_cost_too_much(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where a pass costs by the row, guesses are not worth their rows."""
    auto = make(predictable, line(0.0, 0.01), None)
    seq = draftable(0, [1, 2, 3, 1, 2])
    for _ in range(200):
        auto.draft([seq], [8])
        auto.learn(seq, "ngram", 0, 4)
    assert auto.draft([seq], [8]) == [Draft([], "none")]


def test_long_matches_are_trusted_more(predictable: Any, draftable: Callable[..., Any]) -> None:
    """What is learnt of matches of one token says nothing of long ones: those are drafted further."""
    auto = make(predictable, line(0.01, 0.0012), None)
    short, long = draftable(0, [7, 1, 8, 1]), draftable(1, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2)
    for _ in range(100):
        auto.draft([short, long], [8, 8])
        auto.learn(short, "ngram", 0, 1)
        auto.learn(long, "ngram", 8, 8)
    few, many = auto.draft([short, long], [8, 8])
    assert few.tokens == []
    assert len(many.tokens) >= 4


def test_free_look_up_is_used(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where rows are free, whatever the look-up finds is tried."""
    auto = make(predictable, line(0.05, 0.0), None)
    seqs = [draftable(0, [1, 2, 3, 1, 2]), draftable(1, [7, 8, 9])]
    found, nothing = auto.draft(seqs, [8, 8])
    assert (found.drafter, nothing.drafter) == ("ngram", "none")
    assert len(found.tokens) == 6 or len(found.tokens) == 8
    assert found.tokens == [3, 1, 2, 3, 1, 2, 3, 1][: len(found.tokens)]


def test_a_second_pass_counts(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where a pass costs the same for any rows, drafts fill it, and no second one for what little that would add."""
    seqs = [draftable(i, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2) for i in range(4)]

    def rows(most: int) -> int:
        drafts = make(predictable, line(0.05, 0.0), None, most_rows=most).draft(seqs, [8] * 4)
        return len(seqs) + sum(len(d.tokens) for d in drafts)

    assert [rows(most) for most in (16, 64)] == [16, 36]
