"""Audits of runs whose requests adjust their logits: each token is judged by what stands before it in its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checks import Silent
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine, EngineConfig, SamplingParams
from detgen.kernels.penalties import Adjuster, Penalties
from detgen.kernels.sampling import Choice, choose
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest
from detgen.verify.replay.reading import rounding_explains
from detgen.verify.replay.result import AuditResult

DEFAULTS = SamplingParams(
    max_tokens=20,
    min_tokens=4,
    stop_token_ids=(199, 272),
    ignore_eos=True,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.2,
    logit_bias=((0, 9.0), (259, -100.0)),
)
LINES: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "class Stack:\n", "logprobs": 1, "n": 2},
    {"id": "sampled", "prompt": "def add(a, b):\n", "temperature": 0.8, "seed": 4, "n": 2, "stop_token_ids": []},
    {"id": "stopped", "prompt": "for i in range(", "stop": ["\n", "print"], "logit_bias": {"199": 3}},
]


@pytest.fixture
def folder(tmp_path: Path, engine: Engine) -> Path:
    """The output folder of a run by the draft model."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    drafting = engine.with_settings(drafter="model", draft_tokens=3, batch_size=6)
    config = RunConfig(str(tmp_path / "prompts.jsonl"), tmp_path / "out", DEFAULTS, EngineConfig())
    run(config, Silent(), build_engine=lambda _: drafting)
    return tmp_path / "out"


@pytest.fixture
def audit(engine: Engine) -> Callable[[Path], AuditResult]:
    return lambda folder: Audit(folder, read_manifest(folder), engine, None).run(Silent())


def test_untouched(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Parameters of lines and of the manifest are those of the run."""
    result = audit(folder)
    assert result.findings == []
    assert result.samples == 5
    assert result.tokens > 40
    lines = [json.loads(line) for line in (folder / "outputs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(0 in line["token_ids"][4:-1] for line in lines), "an end-of-sequence token that is ignored"


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": -1.0},
        {"presence_penalty": -2.0},
        {"logit_bias": [[0, 2.0]]},
        {"ignore_eos": False, "logit_bias": [[0, 100.0]]},
        {"stop_token_ids": [14]},
        {"min_tokens": 20},
    ],
    ids=lambda change: " ".join(change),
)
def test_other_parameters(folder: Path, audit: Callable[[Path], AuditResult], change: dict[str, Any]) -> None:
    """Those that did not give the tokens are found."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parameters"].update(change)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert audit(folder).faults


@pytest.mark.parametrize("sample", range(5))
def test_another_token(folder: Path, audit: Callable[[Path], AuditResult], sample: int) -> None:
    """One that was exchanged differs, and what comes after it is judged by the text as it is written."""
    path = folder / "outputs.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[sample]["token_ids"][1] = 17
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["outputs.jsonl"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    first = next(f for f in audit(folder).findings if f.kind == "differs")
    assert first.what.startswith("token 1 is 17")


@examples(150)
@given(
    penalties=st.builds(
        Penalties,
        repetition=st.sampled_from([1.0, 1.4, 0.1]),
        frequency=st.sampled_from([0.0, 0.7]),
        bias=st.sampled_from([(), ((3, 1.5), (7, -2.0))]),
        banned=st.just(frozenset({5})),
        min_tokens=st.sampled_from([0, 9]),
    ),
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 4]),
    seed=st.integers(0, 10**6),
    error=st.sampled_from([1e-3, 0.1, 0.5]),
)
def test_ties(penalties: Penalties, temperature: float, top_k: int, seed: int, error: float) -> None:
    """Whatever logits a little off bring about is explained; a penalty can make the error larger."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(24, generator=g) * 2
    adjustment = Adjuster(penalties, [1, 2, 3]).after([3, 4, 4])
    choice = Choice(temperature, top_k=top_k, seed=seed, adjustment=adjustment)
    for _ in range(8):
        shift = (torch.rand(24, generator=g) - 0.5).sign() * error / 2  # as far apart as they come
        token = int(choose((logits + shift)[None], [choice]).tokens[0])
        assert rounding_explains(logits, choice, token, error * 1.001 + 1e-6)
