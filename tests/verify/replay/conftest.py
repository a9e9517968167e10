"""A finished run to be audited, and copies of it to be tampered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent

from detgen import Engine, EngineConfig, SamplingParams
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest
from detgen.verify.replay.result import AuditResult

LINES: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "def add(a, b):\n", "max_tokens": 24},
    {"id": "sampled", "prompt": "class Stack:\n", "max_tokens": 16, "temperature": 0.9, "seed": 4, "n": 3},
    {"id": "filtered", "prompt": "import os\n", "max_tokens": 16, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
    {"id": "stopped", "prompt": "for i in range(", "max_tokens": 40, "stop": [":"]},
    {"id": "unverified", "prompt": "while True:\n", "max_tokens": 8, "deterministic": False},
    {"id": "broken", "prompt": 7},
    {"id": "too long", "prompt": "x = 1\n" * 700},
    {"id": "last", "prompt": "return ", "max_tokens": 12, "logprobs": 2, "note": "kept"},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    """A folder with prompts and the output folder of a run by the draft model, six at a time."""
    folder = tmp_path_factory.mktemp("audit")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    drafting = engine.with_settings(drafter="model", draft_tokens=3, batch_size=6)
    config = RunConfig(str(folder / "prompts.jsonl"), folder / "out", SamplingParams(), EngineConfig())
    run(config, Silent(), build_engine=lambda _: drafting)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of that output folder, to be tampered with."""
    shutil.copytree(finished / "out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def audit(engine: Engine) -> Callable[[Path], AuditResult]:
    return lambda folder: Audit(folder, read_manifest(folder), engine, None).run(Silent())
