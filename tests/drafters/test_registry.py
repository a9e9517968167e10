"""A drafter is its own file and an entry: everything else finds it by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, Adversary

from detgen import Engine, EngineConfig, EngineError
from detgen.drafters.registry import DRAFTERS, Entry

pytestmark = pytest.mark.usefixtures("probed_once")


def test_every_entry_makes_a_drafter_of_its_name(engines: Callable[..., Engine]) -> None:
    base = engines(drafter="auto", batch_size=3)
    found: dict[str, Any] = {}
    base.with_settings(drafter=lambda named: found.update(named) or named["ngram"])
    assert {name: drafter.name for name, drafter in found.items()} == {n: n for n in DRAFTERS if n != "none"}


def test_without_a_draft_model_only_those_that_need_none_are_there() -> None:
    base = Engine(drafter="ngram", batch_size=3, kv_memory=16 << 20)
    found: dict[str, Any] = {}
    base.with_settings(drafter=lambda named: found.update(named) or named["ngram"])
    assert "model" not in found
    with pytest.raises(EngineError, match="drafter model needs a draft model"):
        base.with_settings(drafter="model")


def test_an_entry_is_all_that_a_new_drafter_needs(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("a_new_drafter")
    module.make = lambda parts: Adversary()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(EngineError, match=r"drafter must be one of auto, .*, none, got 'adversary'"):
        EngineConfig(drafter="adversary")
    monkeypatch.setitem(DRAFTERS, "adversary", Entry("a_new_drafter:make", "unused", "wrong tokens"))
    base = engines(drafter="auto", batch_size=3)
    engine = base.with_settings(drafter="adversary")
    done = engine.generate(PROMPTS, max_tokens=8)
    assert [c.token_ids for c in done] == [c.token_ids for c in base.generate(PROMPTS, max_tokens=8)]
    assert engine.stats.drafters["adversary"].drafted > 0
