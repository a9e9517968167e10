"""The check can fail: the engine broken on purpose, in one way each.

Here a few settings find each fault among a few prompts; that the quick check's own selection does is proved by the slow
tests in test_quick.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import faults
from helpers.checks import first_failure, sweep
from helpers.examples import usual
from helpers.faults import FAULTS, few_rows_by_another_kernel

from detgen import Engine
from detgen.verify.explain.explaining import explain
from detgen.verify.perturb import resuming
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case

ELSEWHERE = ("resume_loses_a_token",)  # needs another process
HERE = sorted(FAULTS.keys() - ELSEWHERE)

SETTINGS = [  # those first that find most
    Setting(batch=3, drafter="adversary", draft_tokens=4, neighbours="broken"),
    Setting(batch=8, drafter="adversary", draft_tokens=4, sampling="T=0.8 penalties"),
    Setting(batch=3, prefix_cache="cold"),
    Setting(batch=3, preemption=True, drafter="ngram", draft_tokens=3),
    Setting(batch=8, drafter="oracle", draft_tokens=8, sampling="stop"),
    Setting(batch=8, chunk=7, neighbours="long", drafter="adversary", draft_tokens=3, prefix_cache="shared"),
    Setting(batch=3, drafter="oracle", draft_tokens=4, neighbours="early", order="reversed", unverified=1),
    Setting(batch=3, chains=True, sampling="T=1.3 top-p"),
    Setting(batch=3, chains=True),
    Setting(batch=3, drafter="ngram", draft_tokens=2, sampling="T=1.3 top-p"),
    Setting(batch=2, drafter="model", draft_tokens=3, neighbours="others"),
    Setting(batch=3, drafter="oracle", draft_tokens=8, sampling="T=0.8 penalties"),
    Setting(batch=3, prefix_cache="warm", drafter="ngram", draft_tokens=3),
    Setting(batch=8, preemption=True, prefix_cache="shared", chunk=7, sampling="T=1.3 top-p"),
]

Patch = pytest.MonkeyPatch


@pytest.fixture
def _swept(engine: Engine) -> Iterator[None]:
    yield
    sweep(engine)


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("fault", usual(HERE[::2], HERE))
def test_found(fault: str, monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    FAULTS[fault](monkeypatch)
    assert first_failure(make_check(pool), SETTINGS).error is None


def test_sound_engine_passes(make_check: Callable[..., Check], pool: Pool) -> None:
    """The same settings find nothing in the engine as it is."""
    check = make_check(pool)
    check.learn()
    result = check.run(SETTINGS)
    assert result.failures == []
    assert result.total.equal
    assert result.total.settings == len(SETTINGS)
    assert result.total.positions > 700
    assert result.total.logits > 150
    assert result.preemptions >= 2


@pytest.mark.usefixtures("kept_models")
def test_resumed_run_that_loses_a_token(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """The command line is killed and run again, and what it wrote is compared."""
    monkeypatch.setattr(resuming, "DETGEN", (sys.executable, faults.__file__, "resume_loses_a_token"))
    check = make_check(pool)
    check.learn()
    result = check.run([Setting(batch=2, drafter="ngram", process="resumed", prefix_cache="cold")])
    assert result.kills == 1
    assert [f.difference.what for f in result.failures] == ["token"]
    assert result.failures[0].difference.tokens[1] is None


def test_resumed_run_that_fails(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """What it says is the error."""
    monkeypatch.setattr(resuming, "DETGEN", (sys.executable, "-c", "import sys; sys.exit('no such thing')"))
    failure = make_check(pool).attempt(Case(Setting(process="resumed"), pool.requests[:1]))
    assert failure is not None
    assert failure.error == "CheckError: detgen run ended with exit status 1: no such thing"


def test_explained(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """A fault of the linear layers is traced to the first of them, under the smallest setting."""
    few_rows_by_another_kernel(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, order="reversed", neighbours="early", drafter="adversary", draft_tokens=4, threads=1)
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    found = explain(check, failure, seconds=30)
    assert found.error is None
    # After the last attention only the one row whose logits are wanted goes on; two prompts make it two.
    assert found.case.setting.changed() == {"batch": 2}
    assert len(found.case.watched) == 2
    assert found.origin is not None
    assert found.origin.module == "layers.5.self_attn.o_proj"
    assert 1 <= found.origin.ulp < 10
    assert found.origin.rows == (1, 2)
    assert found.as_dict()["origin"]["text"].startswith("layers.5.self_attn.o_proj: row ")


@pytest.mark.usefixtures("_swept")
def test_explained_where_a_sample_ends_with_an_error(
    monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool, engine: Engine
) -> None:
    """It shows again when it is repeated, and the error is told."""
    faults.broken_entry_stays(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, drafter="adversary", draft_tokens=4, neighbours="broken")
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    assert failure.difference.what == "missing"
    found = explain(check, failure, seconds=0)
    assert found.error is None
    assert found.origin is not None
    assert "ends with an error: the model's hidden states or logits are not finite" in str(found.origin)


def test_explained_where_only_chains_differ(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """Modules are watched pass by pass, which does not show it; that is said instead."""
    FAULTS["chain_skips_an_entry"](monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, chains=True, order="reversed")
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    found = explain(check, failure, seconds=20)
    assert found.case.setting.chains
    assert found.origin is not None
    assert str(found.origin).startswith("nothing differs where each pass is a call of its own")
