"""The automatic drafter: within its limits always, and sensible where the case is clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
    passes: Any,
    target: PassCost,
    draft: PassCost | None,
    draft_tokens: int | None = None,
    most_rows: int = 128,
    context: int = 10_000,
) -> AutoDrafter:
    model = None
    if draft is not None:
        passes.cost = draft
        model = ModelDrafter(passes, 50, context)
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


class Run:
    """Rounds of sequences that go on by a rule, where a round takes so many seconds and so many more a draft token."""

    def __init__(self, auto: AutoDrafter, seqs: list[Any], rule: Callable[[list[int]], int]) -> None:
        self.auto, self.seqs, self.rule = auto, seqs, rule
        self.drafters: list[str] = []

    def go_on(self, rounds: int, seconds: float = 0.01, each: float = 0.001) -> list[str]:
        """The drafters of the rounds, "none" where nobody was asked."""
        for _ in range(rounds):
            asked = [] if self.auto.patient else self.auto.draft(self.seqs, [8] * len(self.seqs))
            drafts = asked or [Draft([], "none")] * len(self.seqs)
            committed = 0
            for seq, draft in zip(self.seqs, drafts, strict=True):
                accepted = 0
                while accepted < len(draft.tokens) and draft.tokens[accepted] == self.rule(seq.tokens):
                    seq.tokens.append(draft.tokens[accepted])
                    accepted += 1
                seq.tokens.append(self.rule(seq.tokens))
                seq.generated += accepted + 1
                committed += accepted + 1
                if draft.tokens:
                    self.auto.learn(seq, draft.drafter, accepted, min(accepted + 1, len(draft.tokens)))
            self.drafters.append(max((draft.drafter for draft in drafts), key=["none", "ngram", "model"].index))
            drafted = sum(len(draft.tokens) for draft in drafts)
            self.auto.timed(committed, seconds + each * drafted, len(self.seqs))
        return self.drafters[-rounds:]


def unforeseen(tokens: list[int]) -> int:
    """A token that neither stood behind these before nor is what the predictable model says."""
    return (len(tokens) * 7 + 1) % 40_000 + 100


def test_a_draft_model_is_read_before_it_is_tried(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Nothing that it would have said was right, so it never drafts, and reads one sequence only."""
    auto = make(predictable, line(0.01, 0.001), line(0.002, 0.0))
    auto._pace = Pace(auto._ways, "none")
    seqs = [draftable(slot, [slot]) for slot in range(8)]
    assert Run(auto, seqs, unforeseen).go_on(40) == ["none"] * 40
    assert {window.slot for windows in predictable.passes for window in windows} == {0}
    assert auto._by_model.value < 0.2


@pytest.mark.parametrize("good", ["ngram", "model"])
def test_what_would_have_been_right_drafts_soon(predictable: Any, draftable: Callable[..., Any], good: str) -> None:
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0))
    auto._pace = Pace(auto._ways, "none")
    rules = {"model": lambda tokens: draftable(0, tokens).wanted(1)[0], "ngram": lambda tokens: 5 + len(tokens) % 4}
    found = Run(auto, [draftable(slot, [slot]) for slot in range(4)], rules[good]).go_on(60, each=0.0002)
    assert found[:8] == ["none"] * 8
    assert found[30:].count(good) > 20


def test_it_is_too_early_to_look_back(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Sequences that have just begun say nothing; the others go on without drafts, and the try is put off."""
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0))
    auto._pace = Pace(auto._ways, "none")
    run = Run(auto, [draftable(0, [1])], lambda tokens: draftable(0, tokens).wanted(1)[0])
    run.go_on(9)  # the first round says how many sequences there are
    assert auto._pace.begins
    run.seqs = [draftable(1, [1])]
    assert run.go_on(8) == ["none"] * 8
    assert "model" in run.go_on(12)


def test_the_context_of_the_draft_model_is_over(predictable: Any, draftable: Callable[..., Any]) -> None:
    """It cannot read what lies behind."""
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0), context=12)
    auto._pace = Pace(auto._ways, "none")
    assert Run(auto, [draftable(0, [1] * 10)], unforeseen).go_on(30).count("model") == 0
    assert predictable.passes == []


def test_what_is_of_no_use_is_given_up_at_once(predictable: Any, draftable: Callable[..., Any]) -> None:
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    auto._pace = Pace(auto._ways, "none")
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    auto.learn(seq, "model", 0, 40)
    assert Run(auto, [seq], unforeseen).go_on(20) == ["none"] * 20
    assert auto._pace.best == auto._pace.way == "none"
    assert min(auto._pace._due.values()) > 20


def test_what_was_best_and_is_of_no_use_is_left(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Its rounds count, though nobody drafts in them, so the others are tried again."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    auto.learn(seq, "model", 0, 40)
    assert auto._pace.best == "model"
    for _ in range(20):
        auto.draft([seq], [8])
        auto.timed(1, 0.02 if auto._pace.way == "model" else 0.01, 1)
    assert auto._pace.best != "model"


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
    """Where rounds with drafts take longer than anybody foresees, nobody drafts, until they no longer do."""
    auto = make(predictable, line(0.05, 0.0001), line(0.001, 0.0))
    run = Run(auto, [draftable(0, [1, 2, 3])], lambda tokens: draftable(0, tokens).wanted(1)[0])
    run.go_on(200, seconds=0.05, each=0.1)
    assert run.go_on(400, seconds=0.05, each=0.1).count("none") > 380
    run.go_on(600, seconds=0.05, each=0.001)
    assert run.go_on(100, seconds=0.05, each=0.001).count("none") < 10


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


def test_where_nothing_is_found_nothing_is_drafted(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Looking back, tokens without a match cost what they cost without a draft, however good matches are."""
    auto = make(predictable, line(0.01, 0.005), None)
    auto.draft([draftable(0, [1, 2, 3])], [8])
    for rate in auto._by_match:
        rate.learn(50, 50)
    auto._plain = auto._alone(1, 30)
    promised = auto._looked_up([[(0, False)] * 32], 1, 30)
    assert promised * auto._plain == pytest.approx(1.0, rel=0.05)
    assert auto._looked_up([[(3, True)] * 32], 1, 30) > 1.5 * promised
