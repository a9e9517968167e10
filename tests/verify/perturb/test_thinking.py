"""The check of a model that thinks: its axis, where drafts are rolled back, and the faults that it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.checks import Silent, first_failure, sweep
from helpers.examples import thorough, usual
from helpers.thinking_faults import THINKING_FAULTS
from helpers.thinking_models import random_model, save_model

from detgen import Engine, EngineConfig
from detgen.verify.explain.explaining import explain
from detgen.verify.perturb.axes import Setting, make_axes
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import QUICK, read_pool
from detgen.verify.perturb.result import Case
from detgen.verify.perturb.running import Subject
from detgen.verify.perturb.selecting import pairwise

Patch = pytest.MonkeyPatch

SETTINGS = [  # those first that find most
    Setting(batch=8, speculative_prefill="whole", neighbours="long", drafter="adversary", draft_tokens=3),
    Setting(batch=3, speculative_prefill=3),
    Setting(batch=8, drafter="adversary", chunk=7, speculative_prefill=1, prefix_cache="cold"),
    Setting(batch=3, prefix_cache="warm", drafter="ngram", draft_tokens=3, speculative_prefill="auto"),
    Setting(batch=3, drafter="oracle", draft_tokens=4, neighbours="early", order="reversed", unverified=1),
    Setting(batch=3, preemption=True, drafter="ngram", draft_tokens=3, prefix_cache="shared"),
    Setting(batch=8, drafter="oracle", draft_tokens=8, sampling="T=1.3 n=2", chunk=1),
]


@pytest.fixture(scope="module", params=usual(["keep"], ["zero"]))
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_models: Any) -> EngineConfig:
    """A model with random weights, which thinks about most chunks."""
    model = random_model(empty_state=request.param, seed=4)
    folder = save_model(tmp_path_factory.mktemp("thinking"), model, demo_models.target)
    return EngineConfig(target=folder, batch_size=16, kv_memory=16 << 20)


@pytest.fixture(scope="module")
def thinking(config: EngineConfig) -> Engine:
    return Engine(config)


@pytest.fixture
def check(config: EngineConfig, thinking: Engine, pool: Pool) -> Iterator[Check]:
    """A check that has not yet learned; its engine forgets afterwards what a fault left behind."""
    axes = make_axes(drafters=("none", "ngram", "auto"), quants=["none"], processes=False, cores=2, thinks=True)
    yield Check(config, pool, axes, 0, Silent(), Subject(config, thinking))
    sweep(thinking)


def test_sound_engine_passes(check: Check) -> None:
    """States and thoughts are compared beside the rest, and the result says how many."""
    check.learn()
    result = check.run(SETTINGS)
    assert result.failures == []
    assert result.total.equal
    assert result.total.chunks > 400
    assert result.total.chunks_equal == result.total.chunks
    assert check.as_dict()["total"]["chunks"] == result.total.chunks
    assert check.as_dict()["axes"]["speculative_prefill"]["tried"] == ["off", "1", "3", "auto", "whole prompt"]


def test_requests_muse(check: Check) -> None:
    """There are requests whose completions think."""
    check.learn()
    assert check.pool.musing
    engine = check.subject.engine()
    done = engine.generate(check.pool.musing)
    assert any(t.first >= c.prompt_tokens for c in done for t in c.thoughts or ())
    again = check.pool.resampled(check.pool.resampled(check.pool.musing, "T=0.8 penalties"), "own")
    assert again == check.pool.musing


@pytest.mark.parametrize("config", ["keep"], indirect=True)
@pytest.mark.parametrize("fault", sorted(THINKING_FAULTS))
def test_found(fault: str, monkeypatch: Patch, check: Check) -> None:
    THINKING_FAULTS[fault](monkeypatch)
    assert first_failure(check, SETTINGS).error is None


@pytest.mark.parametrize("config", ["zero"], indirect=True)
@pytest.mark.parametrize("fault", usual(["state_a_chunk_late"], ["prefix_without_thoughts"]))
def test_explained(fault: str, monkeypatch: Patch, check: Check) -> None:
    """The first thing that differs is a state or a thought, and the explanation says which."""
    THINKING_FAULTS[fault](monkeypatch)
    found = explain(check, first_failure(check, SETTINGS), seconds=0)
    assert found.error is None
    assert found.origin is not None
    said = str(found.origin)
    assert "the state that is added" in said or "thought (" in said


@thorough
def test_drafts_are_rolled_back_at_each_place_of_a_chunk() -> None:
    """Of the quick check's selection for the embedded model, by the adversary: after its first row, its last, between.

    A window ends with its chunk, so a draft has less tokens than a chunk; the last one is the chunk's last row.
    """
    engine = Engine(target="demo-thinking", batch_size=16, kv_memory=16 << 20)
    axes = make_axes(drafters=("none", "ngram", "auto"), quants=["none"], processes=True, cores=2, thinks=True)
    chosen = [s for s in pairwise(axes, 0) if s.drafter == "adversary" and s.sampling == "own"]
    assert chosen
    pool = read_pool(None, "demo-thinking", None, QUICK)
    check = Check(engine.config, pool, axes, 0, Silent(), Subject(engine.config, engine))
    check.learn()
    assert engine.thinking is not None
    places: Counter[int] = Counter()
    for setting in chosen[:2]:
        case = Case(setting, pool.watched(setting))
        task = check.task(case, check.reference(case))
        with check.subject.configured(task) as configured:
            for done in configured.stream(task.queue):
                for c in done:
                    places.update((c.prompt_tokens + r.position) % 4 for r in c.records if r.status == "corrected")
    assert set(places) == {1, 2, 3}
    assert min(places.values()) > 2
