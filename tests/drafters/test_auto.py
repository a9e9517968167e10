"""The automatic drafter: within its limits always, and sensible where the case is clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import detgen.drafters.auto
from detgen.drafters.auto import AutoDrafter
from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.pace import Pace
from detgen.drafters.protocol import Draft
from detgen.kernels.pass_cost import PassCost


class Clock:
    """Stands for the clock: each look at it takes a little, rounds take what the test says."""

    now, tick = 0.0, 1e-6

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(detgen.drafters.auto, "time", clock)
    return clock


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
    context: int = 10_000,
    way: str | None = None,
) -> AutoDrafter:
    """The drafter; with a way, it knows that rounds without drafts are as predicted, and that this way is best."""
    model = None
    if draft is not None:
        passes.cost = draft
        model = ModelDrafter(passes, 50, context)
        for slot in range(8):
            model.start(slot, [], 0)
    auto = AutoDrafter(NgramDrafter(), model, target, 128, draft_tokens)
    for count in range(1, 9) if way is not None else ():
        rounds = auto._rounds.of(count)
        rounds.learn_plain(count, 1.0, 1.0, count)
        rounds.pace = Pace(("ngram",) if model is None else ("model", "ngram"), way)
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
    way=st.sampled_from([None, "model", "ngram"]),
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
    way: str | None,
    learnt: list[tuple[str, int]],
) -> None:
    """Never more than asked for, and each draft is what the drafter named beside it would write."""
    predictable.entries.clear()
    way = way if draft is not None else way and "ngram"
    costs = line(fixed, row), None if draft is None else line(draft, draft / 10)
    auto = make(predictable, *costs, draft_tokens, way=way)
    seqs = [draftable(i, tokens) for i, (tokens, _) in enumerate(some)]
    lengths = [n for _, n in some]
    if all(draft.drafter == "ngram" for draft in auto.draft(seqs, lengths)):
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
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0), way="model")
    seq = draftable(0, [1, 2, 3], {"model": (0.0, 20.0)})
    for _ in range(200):
        auto.learn(seq, "model", 0, 4)
    assert auto.draft([seq], [8]) == [Draft([], "none")]
    assert predictable.passes == []


class Run:
    """Rounds of sequences that go on by a rule, where a round takes so many seconds and so many more a draft token."""

    def __init__(self, auto: AutoDrafter, clock: Clock, seqs: list[Any], rule: Callable[[list[int]], int]) -> None:
        self.auto, self.clock, self.seqs, self.rule = auto, clock, seqs, rule
        self.asked = 0
        self.waiting = True

    def go_on(self, rounds: int, seconds: float = 0.01, each: float = 0.001) -> list[str]:
        """The drafters of the rounds, "none" where nobody drafted."""
        drafters = []
        for _ in range(rounds):
            started = self.clock.now
            drafts = [Draft([], "none")] * len(self.seqs)
            if not self.auto.idle():
                drafts = self.auto.draft(self.seqs, [8] * len(self.seqs))
                self.asked += 1
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
            drafters.append(max((draft.drafter for draft in drafts), key=["none", "ngram", "model"].index))
            self.clock.now += seconds + each * sum(len(draft.tokens) for draft in drafts)
            self.auto.timed(committed, self.clock.now - started, len(self.seqs), self.waiting)
        return drafters


def unforeseen(tokens: list[int]) -> int:
    """A token that neither stood behind these before nor is what the predictable model says."""
    return (len(tokens) * 7 + 1) % 40_000 + 100


def repeating(tokens: list[int]) -> int:
    """A token that the look-up foresees."""
    return 5 + len(tokens) % 4


def test_a_draft_model_is_read_before_it_is_tried(
    predictable: Any, draftable: Callable[..., Any], clock: Clock
) -> None:
    """Nothing that it would have said was right, so it never drafts, and reads one sequence only."""
    auto = make(predictable, line(0.01, 0.001), line(0.002, 0.0))
    seqs = [draftable(slot, [slot]) for slot in range(8)]
    assert Run(auto, clock, seqs, unforeseen).go_on(60) == ["none"] * 60
    assert {window.slot for windows in predictable.passes for window in windows} == {0}
    assert auto._by_model.value < 0.2


def test_reading_back_takes_a_small_share_of_the_time(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = make(predictable, line(0.01, 0.001), line(0.002, 0.0))
    read, took = predictable.run, []

    def run(*args: Any, **kwargs: Any) -> Any:
        clock.now += 0.05
        took.append(0.05)
        return read(*args, **kwargs)

    monkeypatch.setattr(predictable, "run", run)
    Run(auto, clock, [draftable(0, [1])], unforeseen).go_on(10_000)
    assert 2 * 0.05 <= sum(took) < 0.004 * clock.now


@pytest.mark.parametrize("good", ["ngram", "model"])
def test_what_would_have_been_right_drafts_soon(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, good: str
) -> None:
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0))
    rules = {"model": lambda tokens: draftable(0, tokens).wanted(1)[0], "ngram": repeating}
    run = Run(auto, clock, [draftable(slot, [slot]) for slot in range(4)], rules[good])
    found = run.go_on(60, each=0.0002)
    assert found[0] == "none"
    assert found[30:].count(good) > 20


def test_it_is_too_early_to_look_back(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    """Sequences that have just begun say nothing; the others go on without drafts, and the try is put off."""
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0))
    run = Run(auto, clock, [draftable(0, [1])], lambda tokens: draftable(0, tokens).wanted(1)[0])
    while auto._rounds.of(1).pace._steps < 7:
        run.go_on(1)
    run.seqs = [draftable(1, [1])]
    assert "model" not in run.go_on(7)
    assert "model" in run.go_on(12)


def test_the_context_of_the_draft_model_is_over(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    """It cannot read what lies behind."""
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0), context=12)
    assert Run(auto, clock, [draftable(0, [1] * 10)], unforeseen).go_on(30).count("model") == 0
    assert predictable.passes == []


def test_what_was_best_and_is_of_no_use_is_left(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    """Its rounds count, though nobody drafts in them, so the other is tried again."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0), way="model")
    run = Run(auto, clock, [draftable(0, [1, 2, 3])], lambda tokens: draftable(0, tokens).wanted(1)[0])
    assert run.go_on(60, each=0.0001)[30:].count("model") > 20
    run.rule = unforeseen
    run.go_on(300)
    assert run.go_on(40) == ["none"] * 40


def test_a_good_and_cheap_draft_model_is_used(predictable: Any, draftable: Callable[..., Any]) -> None:
    """If nearly everything is accepted and the draft costs little, drafts are long."""
    auto = make(predictable, line(0.05, 0.0001), line(0.001, 0.0), way="model")
    seq = draftable(0, [1, 2, 3], {"model": (20.0, 20.0)})
    for _ in range(200):
        auto.learn(seq, "model", 4, 4)
    (draft,) = auto.draft([seq], [8])
    assert draft.drafter == "model"
    assert len(draft.tokens) >= 6


def test_drafts_that_take_longer_than_anybody_foresees_end(
    predictable: Any, draftable: Callable[..., Any], clock: Clock
) -> None:
    """Until they no longer do: they are tried again, and not often."""
    for rule in (repeating, lambda tokens: draftable(0, tokens).wanted(1)[0]):
        auto = make(predictable, line(0.05, 0.0001), line(0.001, 0.0))
        run = Run(auto, clock, [draftable(0, [1, 2, 3])], rule)
        run.go_on(200, seconds=0.05, each=0.1)
        assert run.go_on(400, seconds=0.05, each=0.1).count("none") > 370
        run.go_on(600, seconds=0.05, each=0.001)
        assert run.go_on(100, seconds=0.05, each=0.001).count("none") < 10


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.sampled_from([1, 3, 8, 40]), tick=st.floats(1e-6, 1e-4), waiting=st.booleans())
def test_where_nothing_is_found_looking_costs_next_to_nothing(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, count: int, tick: float, waiting: bool
) -> None:
    """However long a look takes; and few sequences stand for all."""
    looked = 0

    class Slow(NgramDrafter):
        """Takes its time, and counts the sequences that it is asked about."""

        def look_up(self, seq: Any, length: int) -> tuple[list[int], int]:
            nonlocal looked
            looked += 1
            clock.now += tick
            return super().look_up(seq, length)

    auto = AutoDrafter(Slow(), None, line(0.001, 0.0001), 128, None)
    run = Run(auto, clock, [draftable(slot, [slot]) for slot in range(count)], unforeseen)
    run.waiting = waiting
    assert run.go_on(1500, seconds=0.001 + 0.0001 * count).count("ngram") == 0
    assert looked * tick < 0.006 * clock.now + 10 * min(count, 8) * tick
    assert looked <= min(count, 8) * run.asked


def test_what_begins_to_repeat_is_seen_soon(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    auto = make(predictable, line(0.01, 0.0001), None)
    run = Run(auto, clock, [draftable(slot, [slot]) for slot in range(2)], unforeseen)
    run.go_on(300, each=0.0001)
    run.rule = repeating
    assert run.go_on(40, each=0.0001).count("ngram") > 15


def test_what_is_often_found_and_never_right_drafts_nothing(
    predictable: Any, draftable: Callable[..., Any], clock: Clock
) -> None:
    """That is seen in what was generated without it."""
    auto = make(predictable, line(0.01, 0.002), None)
    before = [token for i in range(10) for token in (0, 1000 + i)]
    run = Run(auto, clock, [draftable(0, before, generated=20)], lambda t: unforeseen(t) if t[-1] == 0 else 0)
    assert run.go_on(60, each=0.002) == ["none"] * 60


def test_sequences_that_are_far_ahead_are_worth_nothing_when_nobody_waits(
    predictable: Any, draftable: Callable[..., Any], clock: Clock
) -> None:
    """The end waits for the one that repeats nothing, so drafts for the others come to nothing."""
    for waiting in (True, False):
        auto = make(predictable, line(0.01, 0.0005), None)
        seqs = [draftable(slot, [1], remaining=50) for slot in range(3)] + [draftable(3, [2], remaining=900)]
        run = Run(auto, clock, seqs, lambda tokens: repeating(tokens) if tokens[0] == 1 else unforeseen(tokens))
        run.waiting = waiting
        drafted = run.go_on(100, each=0.0005)[50:].count("ngram")
        assert drafted > 40 if waiting else drafted == 0


def test_a_round_in_which_nobody_got_anything_says_nothing(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Others, that nothing is drafted for, may have got tokens."""
    auto = make(predictable, line(0.05, 0.0), None, way="ngram")
    seq = draftable(0, [1, 2, 3, 1, 2])
    auto.draft([seq], [8])
    seq.tokens += [3, 1, 2]
    auto.timed(3, 0.05, 1, True)
    (before,) = auto.draft([seq], [8])
    assert before.tokens
    auto.timed(1, 10.0, 1, True)
    assert auto.draft([seq], [8]) == [before]


def test_rows_that_cost_too_much(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where a pass costs by the row, guesses are not worth their rows."""
    auto = make(predictable, line(0.0, 0.01), None, way="ngram")
    seq = draftable(0, [1, 2, 3, 1, 2])
    for _ in range(200):
        auto.draft([seq], [8])
        auto.learn(seq, "ngram", 0, 4)
    assert auto.draft([seq], [8]) == [Draft([], "none")]


def test_free_look_up_is_used(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where rows are free, whatever the look-up finds is tried."""
    auto = make(predictable, line(0.05, 0.0), None, way="ngram")
    seqs = [draftable(0, [1, 2, 3, 1, 2]), draftable(1, [7, 8, 9])]
    found, nothing = auto.draft(seqs, [8, 8])
    assert (found.drafter, nothing.drafter) == ("ngram", "none")
    assert len(found.tokens) == 6 or len(found.tokens) == 8
    assert found.tokens == [3, 1, 2, 3, 1, 2, 3, 1][: len(found.tokens)]
