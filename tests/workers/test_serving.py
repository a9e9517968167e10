"""A worker's side: its engine's batch does not drain between calls, and who is not expected gets nothing done."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS
from helpers.workers import FedEngine

from detgen import Engine, Request, SamplingParams
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion
from detgen.workers import serving
from detgen.workers.serving import Identity, Serving


def serve(build: Callable[[EngineConfig], Any] = FedEngine, **config: Any) -> tuple[Serving, Identity]:
    served = Serving(EngineConfig(**config), ".", build=build)
    return served, served.begin()


def request(index: int, **params: Any) -> Request:
    params = {"max_tokens": 8, **params}
    return Request(index, f"id {index}", prompt=PROMPTS[index % len(PROMPTS)], params=SamplingParams(**params))


def test_of_requests_only_the_place_comes_back() -> None:
    served, identity = serve()
    answer = served.work(identity.instance, [Request(5, "five", prompt="x" * 1000)])
    assert answer is not None
    [done] = answer.done
    assert done.request == Request(5, "")
    assert answer.stats.tokens == len(done.token_ids)
    assert answer.stats is not served._engine.stats  # type: ignore[union-attr]


def test_another_instance_takes_nothing() -> None:
    served, first = serve()
    assert served.work("another", [request(1)]) is None
    second = served.begin()
    assert second.instance != first.instance
    assert served.work(first.instance, [request(1)]) is None
    answer = served.work(second.instance, [])
    assert answer is not None
    assert answer.done == []
    assert Serving(EngineConfig(), ".", build=FedEngine).work("", [request(1)]) is None


def test_a_call_ends_when_something_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 0.02)
    monkeypatch.setattr(serving.time, "monotonic", lambda: next(clock))
    served, identity = serve(batch_size=50)
    answer = served.work(identity.instance, [request(i) for i in range(50)], seconds=0.05)
    assert answer is not None
    assert 0 < len(answer.done) < 50
    rest = 50 - len(answer.done)
    while rest:
        answer = served.work(identity.instance, [])
        assert answer is not None
        rest -= len(answer.done)
    assert served.work(identity.instance, []).done == []  # type: ignore[union-attr]


def test_a_batch_does_not_drain_between_calls(engines: Callable[..., Engine]) -> None:
    """Requests that come with later calls join those that run; outputs are those of one stream."""
    requests = [request(i, n=1 + i % 2, temperature=0.8, seed=i, max_tokens=4 + i) for i in range(12)]
    requests[7] = Request(7, 7, prompt="")
    want = {
        (c.request.index, c.sample): c
        for batch in engines(drafter="none", batch_size=1).stream(requests)
        for c in batch
    }
    engine = engines(drafter="auto", batch_size=3)
    served, identity = serve(lambda config: engine)
    found: dict[tuple[int, int], Completion] = {}
    live: list[int] = []
    coming = list(requests)
    while len(found) < len(want):
        answer = served.work(identity.instance, [coming.pop(0)] if coming else [])
        assert answer is not None
        live.append(answer.stats.live)
        found |= {(c.request.index, c.sample): c for c in answer.done}  # type: ignore[misc]
    assert max(live[3:8]) > 1
    for key, one in want.items():
        other = found[key]
        assert (one.text, one.token_ids, one.finish_reason, one.error) == (
            *(other.text, other.token_ids, other.finish_reason, other.error),
        )
    served.begin()
    assert engine.stats.live == 0


def test_a_worker_takes_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "usable_cores", lambda: 8)
    monkeypatch.setattr("detgen.models.memory.free_memory", lambda device: 8 << 30)
    seen: list[EngineConfig] = []

    def build(config: EngineConfig) -> FedEngine:
        seen.append(config)
        return FedEngine(config)

    folder = tmp_path / "there"
    folder.mkdir()
    Serving(EngineConfig(device="cpu"), str(folder), 2, build).begin()
    assert Path.cwd() == folder
    Serving(EngineConfig(device="cpu", threads=5, kv_memory=1 << 20), str(tmp_path / "nowhere"), 2, build).begin()
    Serving(EngineConfig(device="cuda"), ".", 2, build).begin()
    assert [(each.threads, each.kv_memory) for each in seen] == [(2, 2 << 30), (5, 1 << 20), (2, None)]
