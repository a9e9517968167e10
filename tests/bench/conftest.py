"""What the benchmark's tests share: tiny models, peers loaded once, and an observer that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome, Peer, Prompt
from detgen.bench.peers import peer_class
from detgen.engine.config import EngineConfig
from detgen.progress import Progress


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Random weights of the tiny configuration, on the CPU."""
    engine = EngineConfig(device="cpu", dtype="float32", threads=2, kv_memory=64 << 20)
    return ModelSource(engine, random_weights="tiny", seed=0, positions=64, scratch=tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def job() -> Job:
    """Five prompts of different lengths, two at a time."""
    prompts = tuple(Prompt(tuple(range(7 * i + 1, 7 * i + 5 + 2 * i)), 6 + i) for i in range(5))
    return Job(prompts, 2, (True,) * 5)


@pytest.fixture(scope="session")
def make_peer() -> Callable[[str, str, ModelSource], tuple[Peer, Contender]]:
    """Makes the peer of a contender, given by its names; models are loaded once for each process that it would have."""
    made: dict[tuple[str, ModelSource], Peer] = {}

    def make(peer: str, name: str, source: ModelSource) -> tuple[Peer, Contender]:
        kind = peer_class(peer)
        contender = next(c for c in kind.contenders(source) if c.name == name)
        key = contender.process, source
        if key not in made:
            made[key] = kind(source, contender, (1, 2, 4))
        return made[key], contender

    return make


@pytest.fixture(scope="session")
def run_peer(make_peer: Callable[..., tuple[Peer, Contender]]) -> Callable[..., Outcome]:
    """Runs a job by a contender, given by its names and by what is to be changed of it."""

    def run(peer: str, name: str, source: ModelSource, job: Job, **changes: Any) -> Outcome:
        made, contender = make_peer(peer, name, source)
        return made.run(replace(contender, **changes), job)

    return run


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[Progress] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stage(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, progress: Progress) -> None:
        self.steps.append(progress)


@pytest.fixture
def told() -> Told:
    return Told()
