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


def test_every_entry_makes_a_drafter_of_its_name(engines: Callable[..., Engine]) -> None:
    base = engines(drafter="auto", batch_size=3)
    found: dict[str, Any] = {}
    base.with_settings(drafter=lambda named: found.update(named) or named["ngram"])
    assert {name: drafter.name for name, drafter in found.items()} == {n: n for n in DRAFTERS}


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
    module: Any = ModuleType("detgen.drafters.adversary")
    module.make = lambda parts: Adversary()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(EngineError, match=r"drafter must be one of auto, .*, none, got 'adversary'"):
        EngineConfig(drafter="adversary")
    monkeypatch.setitem(DRAFTERS, "adversary", Entry("unused", "wrong tokens"))
    base = engines(drafter="auto", batch_size=3)
    engine = base.with_settings(drafter="adversary")
    done = engine.generate(PROMPTS, max_tokens=8)
    assert [c.token_ids for c in done] == [c.token_ids for c in base.generate(PROMPTS, max_tokens=8)]
    assert engine.stats.drafters["adversary"].drafted > 0


def test_what_is_no_drafter_is_refused(engines: Callable[..., Engine]) -> None:
    """A class of one's own without the methods that the engine calls, or nothing at all."""

    class Alike:
        name = "alike"

        def draft(self, seqs: Any, lengths: list[int]) -> list[Any]:
            return []

    base = engines(drafter="auto", batch_size=3)
    wrong: list[tuple[Any, str]] = [(Alike(), "Alike"), (None, "NoneType")]
    for made, kind in wrong:
        with pytest.raises(EngineError, match=rf"derived from detgen\.drafters\.protocol\.Drafter, and {kind} is not"):
            base.with_settings(drafter=lambda _, made=made: made)
