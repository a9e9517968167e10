"""Shrinking: back to the reference axis by axis, with requests that fit the setting, then fewer prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
from helpers.faults import noise_keyed_by_slot

from detgen.verify.explain.explaining import explain, shrink, time_for_shrinking
from detgen.verify.perturb.axes import Axes, Setting, consistent
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case, Failure

FAR = Setting(
    batch=8,
    order="reversed",
    neighbours="long",
    slot=1,
    drafter="oracle",
    draft_tokens=16,
    chunk=7,
    sampling="T=1.3 n=2",
)


def _shrunk(pool: Pool, axes: Axes, culprit: Callable[[Case], bool]) -> tuple[Case, list[Case]]:
    tried = []

    def differs(case: Case) -> bool:
        tried.append(case)
        return culprit(case)

    return shrink(Case(FAR, pool.watched(FAR)), axes, pool, differs, math.inf), tried


def test_what_matters_stays(pool: Pool, axes: Axes) -> None:
    """All but the culprits goes back to the reference, and no setting is tried twice."""
    case, tried = _shrunk(pool, axes, lambda c: c.setting.neighbours == "long" and c.setting.batch != 1)
    assert case.setting == Setting(batch=2, neighbours="long")
    assert len(case.watched) == 1
    settings = [c.setting for c in tried if len(c.watched) == len(pool.watched(FAR))]
    assert len(settings) == len(set(settings))
    assert all(consistent(asdict(s)) for s in settings)


def test_requests_are_sampled_as_the_setting_says(pool: Pool, axes: Axes) -> None:
    """Each case that is tried holds the requests that its setting would have, and so compares like with like."""
    wanted = {kind: {r.id: r.params for r in pool.watched(FAR.turned("sampling", kind))} for kind in ("own", "stop")}
    _, tried = _shrunk(pool, axes, lambda c: c.setting.sampling != "own")
    for kind, params in wanted.items():
        seen = [r for c in tried if c.setting.sampling == kind for r in c.watched]
        assert seen
        assert all(params[r.id] == r.params for r in seen)


def test_prompts_that_matter_stay(pool: Pool, axes: Axes) -> None:
    case, _ = _shrunk(pool, axes, lambda c: {2, 5} <= {r.id for r in c.watched})
    assert [r.id for r in case.watched] == [2, 5]
    assert case.setting == Setting()


def test_time_for_shrinking() -> None:
    """What is left of the minute, some seconds at least, no more than a share of it; more if it is over anyway."""
    assert time_for_shrinking(10) == 20
    assert 5 < time_for_shrinking(35) < 15
    assert time_for_shrinking(43) == 5
    assert time_for_shrinking(300) == 20


def test_time_is_up(pool: Pool, axes: Axes) -> None:
    """Nothing is tried after the deadline."""
    first = Case(FAR, pool.watched(FAR))
    assert shrink(first, axes, pool, lambda _: pytest.fail("tried"), -math.inf) == first


def test_fault_of_the_sampling(monkeypatch: pytest.MonkeyPatch, make_check: Callable[..., Check], pool: Pool) -> None:
    """What differs under sampling alone is not shrunk to greedy text that never differed."""
    noise_keyed_by_slot(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, order="reversed", drafter="ngram", draft_tokens=2, sampling="T=1.3 top-p")
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    finding = explain(check, failure, seconds=60)
    assert finding.error is None
    kept = finding.case.setting.changed()
    assert kept.keys() == {"batch", "sampling"}
    assert kept["sampling"] != "own"
    assert finding.difference.what == "token"


def test_smallest_case_differs_only_once(
    monkeypatch: pytest.MonkeyPatch, make_check: Callable[..., Check], pool: Pool
) -> None:
    """Then the first case, which differs again, is what is explained."""
    noise_keyed_by_slot(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, sampling="T=1.3 top-p")
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    attempt, tried = check.attempt, []

    def differs_once(case: Case) -> Failure | None:
        tried.append(case)
        return attempt(case) if case == failure.case or tried.count(case) == 1 else None

    monkeypatch.setattr(check, "attempt", differs_once)
    finding = explain(check, failure, seconds=60)
    assert tried[-1] == failure.case != tried[-2]
    assert finding.case == failure.case
    assert finding.error is None
    assert finding.origin is not None
