"""A model whose context ends with the job's longest sequence, which is the least that a peer can be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from detgen.bench.interface import Job, ModelSource, Outcome
from detgen.bench.peers import make_peer
from detgen.bench.random_weights import CONFIGS


@pytest.fixture
def tight(source: ModelSource, job: Job, tmp_path: Path) -> ModelSource:
    """The job's longest sequence fills the model's context; `positions` has one more, as in a benchmark."""
    longest = max(len(p.tokens) + p.output for p in job.prompts)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["tiny"] | {"max_position_embeddings": longest}))
    return replace(source, random_weights=str(config), positions=longest + 1)


@pytest.fixture
def run_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a variant that there is on GPUs, in its environment; the models are on the CPU all the same."""

    def run(name: str, variant: str, source: ModelSource, job: Job) -> Outcome:
        peer = make_peer(name)
        chosen = next(v for v in peer.variants(replace(source, device="cuda")) if v.name == variant)
        for setting, value in chosen.environment:
            monkeypatch.setenv(setting, value)
        peer.load(source, chosen, (1, 2, 4))
        return peer.run(chosen, job)

    return run
