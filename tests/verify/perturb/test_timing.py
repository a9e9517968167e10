"""What fits into the time: all prompts with fewer tokens, then fewer prompts, then both."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case
from detgen.verify.perturb.timing import OutOfTime, Timing, quickest

SIZES = [(100, 64, 1)] * 20  # a second to read each, and 6.4 to generate it


@pytest.fixture
def costs() -> Timing:
    return Timing(reading=0.01, token=0.1)


@pytest.mark.parametrize(
    ("seconds", "fitting"),
    [
        (2000.0, (20, 64)),
        (1400.0, (20, 60)),
        (690.0, (20, 24)),
        (400.0, (11, 26)),
        (140.0, (4, 25)),
        (100.0, (4, 15)),
        (20.0, (4, 4)),
        (6.0, (4, 4)),
    ],
)
def test_fitting(costs: Timing, seconds: float, fitting: tuple[int, int]) -> None:
    """The reference has a tenth of the time, as long as there is a choice."""
    assert costs.fitting(SIZES, seconds) == fitting


def test_nothing_fits(costs: Timing) -> None:
    with pytest.raises(OutOfTime):
        costs.fitting(SIZES, 5.0)


def test_copies_and_samples_take_their_time(costs: Timing) -> None:
    assert costs.fitting([(100, 10, 1)], 80.0)[1] >= 10
    assert costs.fitting([(100, 10, 1)], 79.0) == (1, 9), "four of it"
    assert costs.fitting([(100, 10, 3)], 79.0) == (1, 4)


def test_a_chunk_is_a_pass(costs: Timing) -> None:
    assert costs.request(100, 0) == costs.request(100, 0, 64) == pytest.approx(1)
    assert costs.request(100, 0, 1) == pytest.approx(10)


def test_the_pace_is_that_of_the_settings_that_ran(costs: Timing) -> None:
    assert costs.pace == 1
    costs.expected, costs.spent = 10.0, 2.0
    assert costs.pace == pytest.approx(0.2)


def test_a_check_is_shortened_and_says_so(
    make_check: Callable[..., Check], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = make_check(pool)
    monkeypatch.setattr(Timing, "fitting", lambda *_: (4, 3))
    check.learn(time.monotonic() + 100, start=1.0)
    assert [r.params.max_tokens for r in pool.requests] == [3, 3, 3, 3]
    assert check.result.notes == ["shortened to leave time: 4 of 5 prompts with at most 3 new tokens each"]


def test_what_takes_too_long_is_given_up(make_check: Callable[..., Check], pool: Pool) -> None:
    """In the middle of a generation; the engine can be used afterwards."""
    check = make_check(pool)
    with pytest.raises(OutOfTime):
        check.learn(time.monotonic() - 1)
    check.learn()
    setting = Setting(batch=2)
    case = Case(setting, pool.watched(setting))
    task = check.task(case, check.reference(case))
    with pytest.raises(OutOfTime):
        check.subject.generate(task, until=time.monotonic() - 1)
    assert check.attempt(case) is None


def test_settings_that_take_longer_than_is_left_are_left_out(
    make_check: Callable[..., Check], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are tried, and what nobody tried is told."""
    check = make_check(pool)
    check.learn(time.monotonic() + 1000, start=1.0)
    long = lambda self, s: (1e6 if s.chunk == 1 or s.process == "fresh" else 1e-6, 0.0)  # noqa: E731
    monkeypatch.setattr(Check, "expected", long)
    settings = [Setting(batch=2), Setting(batch=2, chunk=1), Setting(batch=3, chunk=7), Setting(slot=1, chunk=1)]
    endless = iter(lambda: Setting(chunk=1), None)
    result = check.run(settings, endless, deadline=time.monotonic() + 1000)
    assert (len(result.selected), result.done, result.total.settings) == (4, 2, 2)
    assert check.left_out() == {"slot": ["1"], "chunk": ["1"]}


def test_new_values_come_first() -> None:
    """What brings many new values in little time comes before what takes long, and that before what brings none."""
    slow, two, again = Setting(process="fresh"), Setting(batch=2, order="reversed"), Setting(batch=2)
    assert quickest([slow, again, two], lambda s: 50.0 if s == slow else 1.0) == [two, slow, again]


def test_costs_are_told_from_what_ran(make_check: Callable[..., Check], pool: Pool) -> None:
    """Chunks of one token and other processes take longer."""
    check = make_check(pool)
    check.learn(time.monotonic() + 1000, start=50.0)
    plain, waiting = check.expected(Setting(batch=2))
    assert waiting == 0
    assert 0 < plain < check.expected(Setting(batch=2, chunk=1))[0]
    assert plain < check.expected(Setting(batch=2, sampling="T=0.7 top-k"))[0], "another reference"
    assert check.expected(Setting(batch=2, process="fresh"))[1] == 50
    assert check.expected(Setting(batch=2, process="resumed"))[1] == 100
