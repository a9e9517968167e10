"""Checks of a target with an adapter: what they compare is its text, in this process and in a run that is killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.adapters import factors, write
from helpers.checks import Silent
from helpers.examples import thorough

from detgen import Engine, EngineConfig
from detgen.verify.perturb.axes import Axes, Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.running import Subject

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.3.mlp.down_proj": (256, 704)}


@thorough
@pytest.mark.usefixtures("kept_models")
def test_settings_are_compared_with_the_adapter(
    tmp_path: Path, config: EngineConfig, axes: Axes, pool: Pool, make_check: Callable[..., Check]
) -> None:
    make_check(pool).learn()
    plain = dict(pool.tokens)
    adapted = replace(config, adapter=write(tmp_path / "adapter", factors(SHAPES)))
    subject = Subject(adapted, Engine(adapted))
    check = Check(adapted, pool, axes=axes, seed=0, observer=Silent(), subject=subject)
    check.learn()
    assert pool.tokens.keys() == plain.keys()
    assert pool.tokens != plain
    result = check.run(
        [
            Setting(batch=3, drafter="adversary", draft_tokens=4, neighbours="broken"),
            Setting(batch=2, drafter="self", process="resumed", prefix_cache="cold"),
        ]
    )
    assert result.failures == []
    assert result.total.settings == 2
    assert result.kills == 1
