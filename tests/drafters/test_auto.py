"""The automatic drafter: the rule, what it learns, and how it tries again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
from helpers.examples import examples, usual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import detgen.drafters.auto
from detgen.drafters.auto import _SHARE, AutoDrafter, Rate, best_counts
from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.protocol import Draft, DraftPlan
from detgen.drafters.registry import Parts
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


class StatedCost(PassCost):
    """What no clock changes."""

    def choose(self, rows: int, seconds: float) -> None:
        """Choosing takes nothing."""


def line(fixed: float, row: float) -> PassCost:
    cost = StatedCost()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        cost.update(rows, fixed + row * rows)
    return cost


def make(
    passes: Any,
    target: PassCost,
    draft: PassCost | None,
    draft_tokens: int | None = None,
    context: int = 10_000,
    name: str = "auto",
) -> AutoDrafter:
    model = None
    if draft is not None:
        passes.cost = draft
        model = ModelDrafter(passes, 50, context)
        for slot in range(8):
            model.start(slot, [], 0)
    return AutoDrafter(Parts(model, target, 128, draft_tokens), name)


@examples(300)
@given(
    rates=st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3),
    fixed=st.floats(0.001, 1.0),
    row=st.floats(0.0001, 1.0),
    each=st.floats(0.0, 1.0),
)
def test_the_best_lengths(rates: list[list[float]], fixed: float, row: float, each: float) -> None:
    """No other numbers of draft tokens promise more, whatever a round costs by k and by the row."""
    chances = [[prod(own[: i + 1]) for i in range(len(own))] for own in rates]

    def seconds(k: int, drafted: int) -> float:
        return fixed + each * k + row * (len(rates) + drafted)

    def speed(counts: tuple[int, ...]) -> float:
        expected = sum(1 + sum(own[:n]) for own, n in zip(chances, counts, strict=True))
        return expected / seconds(max(counts), sum(counts))

    found, counts = best_counts(chances, range(1, 5), seconds, row)
    others = [c for c in product(*(range(len(own) + 1) for own in rates)) if any(c)]
    if not others:
        assert (found, counts) == (0.0, [0] * len(rates))
        return
    # Where the best is less than what a round without drafts gives, any drafts will do: nobody takes them.
    best = max(map(speed, others))
    plain = len(rates) / (fixed + row * len(rates))
    assert found == pytest.approx(speed(tuple(counts)))
    assert found == pytest.approx(best) or max(best, found) <= plain


def test_accepted_tokens_are_those_of_the_paper() -> None:
    """(1 - a^(k+1)) / (1 - a) tokens a round (Leviathan et al. 2023), which one second makes the speed."""
    for k in range(1, 9):
        found, _ = best_counts([[0.8 ** (i + 1) for i in range(k)]], [k], lambda *_: 1.0, 0.0)
        assert found == pytest.approx((1 - 0.8 ** (k + 1)) / (1 - 0.8))


@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fixed=st.floats(0.001, 0.1),
    row=st.floats(0.0001, 0.05),
    draft=st.floats(0.0001, 0.05),
    tried=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=3),
    repeats=st.booleans(),
)
def test_the_drafter_is_the_one_that_promises_most(
    predictable: Any,
    draftable: Callable[..., Any],
    fixed: float,
    row: float,
    draft: float,
    tried: list[tuple[int, int]],
    repeats: bool,
) -> None:
    """As all of them and all lengths say that are evaluated one by one."""
    predictable.entries.clear()
    auto = make(predictable, line(fixed, row), line(draft, 0.0))
    text = [1, 2, 3, 1, 2] if repeats else [1]
    seqs = [draftable(i, list(text), {"model": (float(min(pair)), float(max(pair)))}) for i, pair in enumerate(tried)]
    count, speeds = len(seqs), {"none": len(seqs) / (fixed + row * len(seqs))}
    own = {
        "ngram": [[0.5] * 8 if repeats else [] for _ in seqs],
        "model": [[(hits + 2.0) / (tries + 4.0)] * 8 for hits, tries in (s.acceptance["model"] for s in seqs)],
    }
    for name, rates in own.items():
        for k in range(1, 9):
            # At a given k, tokens are taken in the order of their chances.
            chances = sorted((prod(r[: i + 1]) for r in rates for i in range(min(k, len(r)))), reverse=True)
            for n in range(1, len(chances) + 1):
                seconds = fixed + row * (count + n) + (k * draft if name == "model" else 0.0)
                speeds[name] = max(speeds.get(name, 0.0), (count + sum(chances[:n])) / seconds)
    found = {d.drafter for d in auto.draft(seqs, [8] * count) if d.tokens} or {"none"}
    assert speeds[found.pop()] == pytest.approx(max(speeds.values()))


@pytest.mark.parametrize(("draft", "accepted", "length"), [(1e-5, 20, 8), (0.004, 20, 4), (0.02, 20, 1), (0.02, 0, 1)])
def test_one_drafter_alone_always_drafts(
    predictable: Any, draftable: Callable[..., Any], draft: float, accepted: int, length: int
) -> None:
    """Though drafting nothing would be faster, by the last of these costs; the rule says how much."""
    predictable.entries.clear()
    alone = make(predictable, line(0.01, 0.0002), line(draft, 0.0), name="model")
    seq = draftable(0, [1], {"model": (float(accepted), 20.0)})
    for _ in range(20):
        assert not alone.idle()
        assert [len(d.tokens) for d in alone.draft([seq], [8])] == [length]
        alone.timed(1.0, draft * length + 0.01, 1)


@pytest.mark.parametrize(("took", "wait"), [(0.01, 0.0), (0.016, 0.006), (5.0, 0.01)])
def test_a_look_in_vain_costs_the_passes_that_one_call_would_have_made(
    predictable: Any, draftable: Callable[..., Any], took: float, wait: float
) -> None:
    """A pass of 10 ms is as predicted; what it takes longer counts, up to as much again."""
    predictable.entries.clear()
    auto = make(predictable, line(0.01, 0.0), None)
    assert not auto.draft([draftable(0, [1])], [8])[0].tokens
    looked = auto._again["ngram"]
    (look,) = auto._in_vain.values()
    auto.timed(1, took + look, 1)
    assert auto._again["ngram"] - looked == pytest.approx(wait / _SHARE, abs=1e-3)


def test_a_sequence_begins_at_the_rate_of_the_run() -> None:
    """And what became of its own drafts outweighs that the more of them there were."""
    rate = Rate()
    assert rate.mean == rate.own(0, 0) == 0.5
    for _ in range(100):
        rate.learn(4, 4)
    assert rate.own(0, 0) == rate.mean > 0.95
    assert rate.mean > rate.own(0, 4) > rate.own(0, 20)
    for _ in range(100):
        rate.learn(0, 4)
    assert rate.mean < 0.2  # old tokens fade


SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 14)), min_size=1, max_size=8
)


@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    costs = line(fixed, row), None if draft is None else line(draft, draft / 10)
    auto = make(predictable, *costs, draft_tokens)
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


class Run:
    """Rounds of sequences that go on by a rule, where a round takes so many seconds and so many more a draft token."""

    def __init__(self, auto: AutoDrafter, clock: Clock, seqs: list[Any], rule: Callable[[list[int]], int]) -> None:
        self.auto, self.clock, self.seqs, self.rule = auto, clock, seqs, rule
        self.asked = 0

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
                committed += accepted + 1
                if draft.tokens:
                    tried = min(accepted + 1, len(draft.tokens))
                    hits, tries = seq.acceptance.get(draft.drafter, (0.0, 0.0))
                    seq.acceptance[draft.drafter] = (0.8 * hits + accepted, 0.8 * tries + tried)
                    self.auto.learn(seq, draft.drafter, accepted, tried)
            drafters.append(max((draft.drafter for draft in drafts), key=["none", "ngram", "model"].index))
            self.clock.now += seconds + each * sum(len(draft.tokens) for draft in drafts)
            self.auto.timed(committed / len(self.seqs), self.clock.now - started, len(self.seqs))
        return drafters


def unforeseen(tokens: list[int]) -> int:
    """A token that neither stood behind these before nor is what the predictable model says."""
    return (len(tokens) * 7 + 1) % 40_000 + 100


def repeating(tokens: list[int]) -> int:
    """A token that the look-up foresees."""
    return 5 + len(tokens) % 4


@pytest.mark.parametrize("good", usual(["ngram"], ["model"]))
def test_it_comes_back_to_a_drafter_that_improved(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, good: str
) -> None:
    rules = {"model": lambda tokens: draftable(0, tokens).wanted(1)[0], "ngram": repeating}
    auto = make(predictable, line(0.01, 0.0005), line(0.002, 0.0))
    run = Run(auto, clock, [draftable(slot, [slot + 1]) for slot in range(2)], unforeseen)
    run.go_on(100)
    assert run.go_on(50).count("none") > 46
    run.rule = rules[good]
    run.go_on(200)
    assert run.go_on(20).count(good) > 16
    run.rule = unforeseen
    run.go_on(100)
    assert run.go_on(50).count("none") > 46


@pytest.mark.parametrize("count", [1, 4])
def test_what_is_never_accepted_costs_the_stated_share(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, count: int
) -> None:
    """Drafts are tried again, ever and anon, and lose no more time than that."""
    auto = make(predictable, line(0.01, 0.001), line(0.005, 0.0))
    run = Run(auto, clock, [draftable(slot, [slot + 1]) for slot in range(count)], unforeseen)
    run.go_on(100, each=0.006)
    started, rounds = clock.now, 4000
    tried = rounds - run.go_on(rounds, each=0.006).count("none")
    assert tried > 2
    lost = (clock.now - started) / (rounds * 0.01) - 1
    assert 0 < lost < 2 * _SHARE


def test_drafts_that_take_longer_than_anybody_foresees_end(
    predictable: Any, draftable: Callable[..., Any], clock: Clock
) -> None:
    """Until they no longer do: they are tried again, and not often."""
    auto = make(predictable, line(0.05, 0.0001), None)
    run = Run(auto, clock, [draftable(0, [1, 2, 3])], repeating)
    run.go_on(200, seconds=0.05, each=0.06)
    assert run.go_on(100, seconds=0.05, each=0.06).count("none") > 95
    run.go_on(2500, seconds=0.05, each=0.001)
    assert run.go_on(100, seconds=0.05, each=0.001).count("none") < 10


@pytest.mark.parametrize("rule", [repeating, unforeseen])
def test_one_pause_of_the_machine_says_nothing(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, rule: Callable[[list[int]], int]
) -> None:
    auto = make(predictable, line(0.01, 0.0005), None)
    run = Run(auto, clock, [draftable(0, [1])], rule)
    run.go_on(100)
    before = dict(auto._factors)
    run.go_on(1, seconds=60.0)
    assert auto._factors == pytest.approx(before, rel=0.05)


def test_calls_of_several_passes_are_known_by_their_tokens(predictable: Any, draftable: Callable[..., Any]) -> None:
    """They are quicker than the passes they are made of, and drafts have to be worth more then."""
    auto = make(predictable, line(0.01, 0.001), None)
    seq = draftable(0, [1])
    auto.draft([seq], [8])
    assert auto.idle()
    for _ in range(9):
        auto.timed(4.0, 4 * 0.5 * 0.011, 1)
    assert auto._factors["none", 1] == pytest.approx(0.5)


def test_other_numbers_of_sequences_are_planned_for_at_once(predictable: Any, draftable: Callable[..., Any]) -> None:
    auto = make(predictable, line(0.01, 0.001), None)
    auto.draft([draftable(0, [1]), draftable(1, [1])], [8, 8])
    auto.timed(1.0, 1e-9, 2)
    assert auto.idle()
    auto.timed(1.0, 1e-9, 1)
    assert not auto.idle()


def test_the_context_of_the_draft_model_is_over(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    """It cannot read what lies behind."""
    auto = make(predictable, line(0.01, 0.0001), line(0.001, 0.0), context=12)
    assert Run(auto, clock, [draftable(0, [1] * 12)], unforeseen).go_on(30).count("model") == 0
    assert predictable.passes == []


@settings(examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.sampled_from([1, 3, 8, 40]), tick=st.floats(1e-6, 1e-4))
def test_where_nothing_is_found_looking_costs_next_to_nothing(
    predictable: Any, draftable: Callable[..., Any], clock: Clock, count: int, tick: float
) -> None:
    """However long a look takes."""
    looked = 0

    class Slow(NgramDrafter):
        """Takes its time, and counts the sequences that it is asked about."""

        def look_up(self, seq: Any, length: int) -> tuple[list[int], int]:
            nonlocal looked
            looked += 1
            clock.now += tick
            return super().look_up(seq, length)

    auto = make(predictable, line(0.001, 0.0001), None)
    auto._ngram = Slow()
    run = Run(auto, clock, [draftable(slot, [slot]) for slot in range(count)], unforeseen)
    assert run.go_on(1200, seconds=0.001 + 0.0001 * count).count("ngram") == 0
    assert count * 2 < looked
    assert looked * tick < _SHARE * clock.now + 10 * count * tick


def test_what_begins_to_repeat_is_seen_soon(predictable: Any, draftable: Callable[..., Any], clock: Clock) -> None:
    auto = make(predictable, line(0.01, 0.0001), None)
    run = Run(auto, clock, [draftable(slot, [slot]) for slot in range(2)], unforeseen)
    run.go_on(300, each=0.0001)
    run.rule = repeating
    assert run.go_on(40, each=0.0001).count("ngram") > 15


def test_the_length_that_the_user_wants(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Where rows are free, whatever the look-up finds is tried; and no other length is."""
    for length in (3, 6):
        auto = make(predictable, line(0.05, 0.0), None, draft_tokens=length)
        found, nothing = auto.draft([draftable(0, [1, 2, 3, 1, 2]), draftable(1, [7, 8, 9])], [length] * 2)
        assert found == Draft([3, 1, 2, 3, 1, 2][:length], "ngram")
        assert nothing == Draft([], "none")


def test_a_device_looks_up(predictable: Any, draftable: Callable[..., Any]) -> None:
    """In rounds of one call; what it drafts is learned from as if it had been looked up here."""
    auto, seq = make(predictable, line(0.05, 0.0), None, draft_tokens=3), draftable(0, [1, 2, 3, 1, 2])
    plan = auto.plan([seq, draftable(1, [7, 8, 9])], [3, 3])
    assert isinstance(plan, DraftPlan)
    assert (plan.drafter, plan.nothing, plan.runner, plan.rounds) == ("ngram", "none", None, None)
    assert plan.counts == [3, 0]
    plan.wrote(seq, [3, 1, 2])
    before = [rate.mean for rate in auto._by_match]
    auto.learn(seq, "ngram", 1, 2)
    after = [rate.mean for rate in auto._by_match]
    assert [a > b for a, b in zip(after, before, strict=True)].index(True) == 2
    assert [a < b for a, b in zip(after, before, strict=True)].index(True) == 3
    with pytest.raises(AssertionError, match="looks up what the host does"):
        plan.wrote(seq, [3, 1, 1])
    assert auto.plan([draftable(1, [7, 8, 9])], [3]) == [Draft([], "none")]


def test_no_window_is_longer_than_a_pass(predictable: Any, draftable: Callable[..., Any]) -> None:
    auto = make(predictable, line(0.05, 0.0), None, draft_tokens=1000)
    (found,) = auto.draft([draftable(0, [1, 2, 3, 1, 2])], [127])
    assert len(found.tokens) == 127


def test_a_round_that_is_no_measure(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Of one in which others drafted, it learns that time went by, and nothing of costs."""
    auto = make(predictable, line(0.01, 0.0), None, name="auto")
    for _ in range(3):
        auto.draft([draftable(0, [1])], [8])
        assert auto.idle(), "nothing was found"
        auto.timed(3.0, 50.0, 0)
        assert not auto.idle()
    assert not auto._factors
