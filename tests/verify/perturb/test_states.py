"""The check of a model whose layers keep states: what it finds, and that it finds nothing in a sound engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.checks import Silent, first_failure, sweep
from helpers.examples import usual
from helpers.families import DESCRIBED, ROWS
from helpers.snapshot_faults import SNAPSHOT_FAULTS
from helpers.state_faults import CONVOLUTION_FAULTS, STATE_FAULTS

from detgen import Engine, EngineConfig
from detgen.verify.perturb.axes import Setting, make_axes
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.running import Subject

SETTINGS = [
    Setting(batch=3, drafter="adversary", draft_tokens=4, neighbours="broken", prefix_cache="cold"),
    Setting(batch=3, preemption=True, drafter="ngram", draft_tokens=3),
    Setting(batch=8, drafter="oracle", draft_tokens=64, sampling="stop", prefix_cache="warm"),
    Setting(batch=8, chunk=7, neighbours="long", drafter="self", draft_tokens=3, prefix_cache="cold"),
    Setting(batch=3, chains=True, sampling="T=1.3 n=2", order="reversed", prefix_cache="warm"),
]


# Of deltas, of convolutions alone, of state spaces beside an attention. What a draft leaves of a convolution is right
# where its last tokens are.
FAULTS = {
    "qwen3_5_text": STATE_FAULTS | SNAPSHOT_FAULTS,
    "lfm2": CONVOLUTION_FAULTS | {name: f for name, f in SNAPSHOT_FAULTS.items() if name != "snapshot_of_a_draft"},
    "falcon_h1": STATE_FAULTS | SNAPSHOT_FAULTS,
    "jamba": STATE_FAULTS | SNAPSHOT_FAULTS,
}


@pytest.fixture(scope="module")
def engine_of(random_model: Callable[..., Path]) -> Callable[[str], Engine]:
    """The engine of a family, made once."""

    @functools.cache
    def made(family: str) -> Engine:
        config = (DESCRIBED | ROWS)[family]()
        config.vocab_size = 4096
        return Engine(EngineConfig(target=random_model(config), batch_size=16, kv_memory=16 << 20))

    return made


@pytest.fixture(params=usual(["qwen3_5_text"], FAULTS))
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def check(family: str, engine_of: Callable[[str], Engine], pool: Pool) -> Iterator[Check]:
    stateful = engine_of(family)
    config = stateful.config
    axes = make_axes(drafters=("none", "ngram", "self"), quants=["none"], processes=False, cores=2)
    yield Check(config, pool, axes, 0, Silent(), Subject(config, stateful))
    sweep(stateful)


def test_sound_engine_passes(check: Check) -> None:
    check.learn()
    result = check.run(SETTINGS)
    assert result.failures == []
    assert result.total.equal
    assert result.preemptions


@pytest.mark.parametrize(
    ("family", "fault"),
    [(family, fault) for family in usual(["qwen3_5_text", "lfm2"], FAULTS) for fault in FAULTS[family]],
    indirect=["family"],
)
def test_found(family: str, fault: str, monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    FAULTS[family][fault](monkeypatch)
    assert first_failure(check, SETTINGS).error is None
