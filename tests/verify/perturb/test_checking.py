"""Which settings are tried: until enough differ, or for a while after the first one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from detgen.verify.perturb import checking
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Difference
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case, Failure

MANY = [Setting(slot=n) for n in range(100)]


class Clock:
    """A second a setting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """What a check tries, without generating; settings with a prefix cache differ."""
    clock, seen = Clock(), list[Setting]()

    def attempt(self: Check, case: Case, tally: object = None) -> Failure | None:
        clock.now += 1
        seen.append(case.setting)
        return Failure(case, Difference(1, 0, "token", 3, 0)) if case.setting.prefix_cache != "off" else None

    monkeypatch.setattr(checking, "time", clock)
    monkeypatch.setattr(Check, "attempt", attempt)
    return seen


def test_all_equal(tried: list[Setting], make_check: Callable[..., Check], pool: Pool) -> None:
    assert make_check(pool).run(MANY).failures == []
    assert tried == MANY


def test_deadline(tried: list[Setting], make_check: Callable[..., Check], pool: Pool) -> None:
    def endless() -> Iterator[Setting]:
        return (Setting(slot=n) for n in count())

    make_check(pool).run([], endless(), deadline=10)
    assert len(tried) == 11


def test_three_that_differ_are_enough(tried: list[Setting], make_check: Callable[..., Check], pool: Pool) -> None:
    settings = [s.turned("prefix_cache", "cold") for s in MANY]
    assert len(make_check(pool).run(settings).failures) == 3
    assert len(tried) == 3


def test_no_more_are_waited_for(tried: list[Setting], make_check: Callable[..., Check], pool: Pool) -> None:
    """After the first one that differs, only some seconds are spent on looking for others."""
    settings = [s.turned("prefix_cache", "cold" if s.slot in (7, 50) else "off") for s in MANY]
    assert [f.case.setting.slot for f in make_check(pool).run(settings).failures] == [7]
    assert 8 < len(tried) < 20
