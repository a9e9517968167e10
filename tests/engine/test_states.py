"""Models whose layers keep states: little memory, samples of a prompt, more slots, what cannot be had with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_inputs import adversary
from helpers.examples import usual
from helpers.families import DESCRIBED, ROWS

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.models.known import known
from detgen.progress import Unobserved
from detgen.runner.snapshots import Snapshots


def made(family: str, random_model: Callable[..., Path]) -> Path:
    config = (DESCRIBED | ROWS)[family]()
    config.vocab_size = 4096
    return random_model(config)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2", "falcon_h1"])
def every_folder(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Path:
    """Of deltas, of convolutions alone, of a state space beside an attention."""
    return made(request.param, random_model)


@pytest.fixture(scope="module")
def folder(random_model: Callable[..., Path]) -> Path:
    return made("qwen3_5_text", random_model)


@pytest.fixture(scope="module")
def engine(every_folder: Path) -> Engine:
    return Engine(target=every_folder, drafter="none", batch_size=2, kv_memory=4 << 20)


@pytest.fixture(scope="module")
def of_deltas(folder: Path) -> Engine:
    return Engine(target=folder, drafter="none", batch_size=2, kv_memory=4 << 20)


def requests() -> list[Request]:
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    some = [Request(i, i, token_ids=tuple(range(3 + i, 90)), params=params) for i in range(5)]
    return [
        *some,
        Request(5, 5, token_ids=tuple(range(3, 90)), params=SamplingParams(n=3, temperature=1.0, max_tokens=9)),
    ]


@pytest.fixture(scope="module")
def reference(engine: Engine, observe: Callable[..., Any]) -> Any:
    return observe(engine.with_settings(batch_size=1), requests())


SETTINGS: dict[str, dict[str, Any]] = {
    "adversary": {"batch_size": 8, "drafter": adversary, "draft_tokens": 15},  # more slots than there was room for
    "self": {"batch_size": 5, "drafter": "self", "draft_tokens": 64, "prefill_chunk": 9},
    "preempted": {"batch_size": 5, "drafter": "auto", "positions": 450},
}


@pytest.mark.parametrize("name", usual(["adversary", "preempted"], SETTINGS))
def test_bits(engine: Engine, reference: Any, observe: Callable[..., Any], name: str) -> None:
    settings = dict(SETTINGS[name])
    positions = settings.pop("positions", None)
    if positions:
        settings["kv_memory"] = positions * engine.position_bytes
    other = engine.with_settings(**settings)
    found = observe(other, requests())
    assert len(found) == len(reference) == 8
    for key, one in reference.items():
        assert found[key].differs(one) is None, key
    assert bool(other.stats.preemptions) == bool(positions)


def test_where_there_is_no_room_for_snapshots(folder: Path) -> None:
    """A prompt of several samples is read for each, since no page holds a state, and that is said."""
    said: list[str] = []

    class Noting(Unobserved):
        def message(self, text: str) -> None:
            said.append(text)

    least = 384 * Engine(target=folder, drafter="none", kv_memory=4 << 20, observer=Noting()).position_bytes
    assert not said, "there is room"
    engine = Engine(target=folder, drafter="none", kv_memory=least, observer=Noting())
    assert len(said) == 1
    assert "no room for snapshots of them: prompts do not share prefixes" in said[0]
    Engine(target=folder, drafter="none", kv_memory=least, prefix_cache=False, observer=Noting())
    assert len(said) == 1
    engine.generate([requests()[-1]])
    assert (engine.stats.prompt_tokens, engine.stats.reused_tokens) == (3 * 87, 0)


@pytest.mark.parametrize("memory", [4 << 20, 64 << 20])
def test_snapshots_take_their_part_of_the_memory(folder: Path, memory: int) -> None:
    """They and the pages take what they are given together."""
    engine = Engine(target=folder, drafter="none", kv_memory=memory)
    prepared = engine._prepared
    assert prepared.snapshots is not None
    states = prepared.runners[0].cache.states
    assert states is not None
    held = prepared.snapshots.count * Snapshots.bytes(states.shapes)
    assert 0 < held <= memory // 8
    assert prepared.snapshots.count <= 64
    assert 0 <= memory - held - prepared.pages.count * 64 * engine.position_bytes < 64 * engine.position_bytes


def test_it_is_no_draft_model(folder: Path) -> None:
    with pytest.raises(EngineError, match="keeps states of what it has read, so it cannot be a draft model; use "):
        Engine(target=folder, draft=folder, kv_memory=4 << 20)


def test_what_a_position_takes(every_folder: Path, engine: Engine) -> None:
    """As `detgen models` says it: layers without keys take nothing."""
    assert known(str(every_folder)).kv == engine.position_bytes


def test_memory_for_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.runner.preparing.room_beside", lambda *_: 1 << 20)
    with pytest.raises(EngineError, match=r"no memory for the states that .+ of 500 requests .+ smaller --batch-size"):
        Engine(target=folder, drafter="none", batch_size=500, kv_memory=4 << 20)


def test_memory_for_states_of_more_requests(of_deltas: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that there is room for already are not counted again."""
    monkeypatch.setattr("detgen.runner.preparing.room_beside", lambda *_: 1 << 20)
    of_deltas.with_settings(batch_size=of_deltas.config.batch_size)
    with pytest.raises(EngineError, match=r"no memory for the states that .+ of 500 requests .+ smaller --batch-size"):
        of_deltas.with_settings(batch_size=500)
