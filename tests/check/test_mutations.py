"""The check can fail: the engine broken on purpose, in one way each, and found by the settings of the quick check."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.faults import FAULTS, few_rows_by_another_kernel, resume_loses_a_token

from detgen.check.axes import Setting, make_axes
from detgen.check.checking import Case, Check
from detgen.check.pool import Pool
from detgen.explain.explaining import explain

ELSEWHERE = ("resume_loses_a_token", "outlier_columns_of_the_pass")  # need another process, another model

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - ELSEWHERE))
def test_found(
    fault: str,
    monkeypatch: Patch,
    make_check: Callable[..., Check],
    pool: Pool,
    selection: list[Setting],
) -> None:
    """The pairwise settings find the fault."""
    FAULTS[fault](monkeypatch)
    check = make_check(pool)
    check.learn()
    for setting in selection:
        if failures := check.run([setting], None).failures:
            assert failures[0].error is None
            return
    pytest.fail(f"{len(selection)} settings, and none differs")


def test_sound_engine_passes(make_check: Callable[..., Check], pool: Pool, selection: list[Setting]) -> None:
    """The same settings find nothing in the engine as it is."""
    check = make_check(pool)
    check.learn()
    result = check.run(selection[:20], None)
    assert result.failures == []
    assert result.total.equal
    assert result.total.settings == 20
    assert result.total.positions > 2000
    assert result.total.logits > 500


def test_resumption_that_loses_a_token(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """Found by the axis of processes, which writes files."""
    resume_loses_a_token(monkeypatch)
    axes = make_axes(has_draft=True, quants=["none"], processes=True, cores=2)
    with make_check(pool, axes=axes) as check:
        check.learn()
        setting = Setting(batch=2, drafter="ngram", process="resumed")
        result = check.run([setting, setting.turned("batch", 3)], 2)
    assert [f.difference.what for f in result.failures] == ["token", "token"]
    assert result.failures[0].difference.tokens[1] is None
    assert (result.stops, result.kills) == (1, 1)  # the last one is killed


def test_explained(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """A fault of the linear layers is traced to the first of them, under the smallest setting."""
    few_rows_by_another_kernel(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, order="reversed", neighbours="early", drafter="adversary", draft_tokens=4, threads=1)
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    finding = explain(check, failure, seconds=30)
    assert finding.error is None
    # Behind the last attention only the one row whose logits are wanted goes on; two prompts make it two.
    assert finding.case.setting.changed() == {"batch": 2}
    assert len(finding.case.watched) == 2
    assert finding.origin is not None
    assert finding.origin.module == "layers.5.o_proj"
    assert 1 <= finding.origin.ulp < 10
    assert finding.origin.rows == (1, 2)
    assert finding.as_dict()["origin"]["text"].startswith("layers.5.o_proj: row ")
