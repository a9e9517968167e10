"""detgen score: every option arrives, and results and errors go where they belong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.commands import SUMMARY, invoke
from typer.testing import CliRunner

import detgen.run
from detgen import cli
from detgen.engine.config import EngineConfig
from detgen.errors import RunError
from detgen.outputs import Totals
from detgen.run import ScoreConfig

SAMPLES = Path(__file__).parents[2] / "sample_prompts" / "scores.jsonl"


@pytest.fixture
def score_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Invoke `detgen score` with a run that does not run: it ends as `outcome` says and keeps what it was given."""

    def score_with(*arguments: str, outcome: Any = SUMMARY) -> Any:
        seen: list[Any] = []

        def run(config: Any, observer: Any) -> Any:
            seen.append(config)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(detgen.run, "run", run)
        monkeypatch.setattr(sys, "argv", ["detgen", "score", *arguments])
        return invoke("score", *arguments), seen[0] if seen else None

    return score_with


def test_defaults_are_those_of_the_api(score_with: Any) -> None:
    result, config = score_with("p.jsonl")
    assert result.exit_code == 0, result.output
    assert config == ScoreConfig("p.jsonl", None, EngineConfig(drafter="none"))


def test_every_option_arrives(score_with: Any) -> None:
    result, config = score_with(
        *("-", "-o", "folder", "--target", "T", "--device", "cuda:1", "--dtype", "bf16", "--target-quant", "q8"),
        *("--batch-size", "6", "--threads", "1", "--kv-memory", "4GiB", "--prefix-cache", "off"),
        *("--speculative-prefill", "3", "--prompt-column", "q", "--echo", "--limit", "9", "--overwrite", "--strict"),
        *("--quiet", "--trust-remote-code"),
    )
    assert result.exit_code == 0, result.output
    engine = EngineConfig(
        target="T",
        drafter="none",
        batch_size=6,
        device="cuda:1",
        dtype="bfloat16",
        target_quant="q8",
        threads=1,
        kv_memory=4 * 2**30,
        prefix_cache=False,
        speculative_prefill=3,
        trust_remote_code=True,
    )
    assert config == ScoreConfig("-", Path("folder"), engine, 9, True, "q", True)


def test_the_help(score_with: Any) -> None:
    result = invoke("score", "--help")
    assert result.exit_code == 0
    command: Any = typer.main.get_command(cli.app)
    for param in command.commands["score"].params:
        assert param.opts[0] in result.stdout or param.name == "prompts"
    assert "  detgen score questions.jsonl" in result.stdout


def test_exit_statuses(score_with: Any) -> None:
    failed = replace(SUMMARY, written=Totals(prompts=2, samples=1, errors=1, tokens=3))
    assert score_with("p.jsonl", outcome=failed)[0].exit_code == 0
    assert score_with("p.jsonl", "--strict", outcome=failed)[0].exit_code == 1
    assert score_with("p.jsonl", outcome=replace(failed, written=Totals(prompts=1, errors=1)))[0].exit_code == 1
    refused, _ = score_with("p.jsonl", outcome=RunError("no such file"))
    assert (refused.exit_code, refused.stderr) == (2, "detgen: error: no such file\n")
    interrupted, _ = score_with("p.jsonl", "--overwrite", outcome=KeyboardInterrupt())
    assert interrupted.exit_code == 130
    assert interrupted.stderr.splitlines()[-1].strip() == "detgen score p.jsonl"


def test_wrong_usage(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli.app, ["score", str(tmp_path / "none.jsonl")]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["score", "p.jsonl", "--temperature", "1"]).exit_code == 2


def test_the_sample_is_scored_and_passes_an_audit(tmp_path: Path) -> None:
    """And what is changed behind is found."""
    words = ["score", str(SAMPLES), "-o", str(tmp_path), "-q", "--kv-memory", "64MiB"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    audit = ["audit", str(tmp_path), "-q"]
    assert CliRunner().invoke(cli.app, audit).exit_code == 0
    text = (tmp_path / "outputs.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    (tmp_path / "outputs.jsonl").write_text(text.replace(str(first["logprob"]), "-1.0"))
    found = CliRunner().invoke(cli.app, audit)
    assert found.exit_code == 1
    assert "outputs.jsonl:1: logprob is -1.0" in found.stdout


@pytest.mark.parametrize("command", [("export", "out", "--to", "csv"), ("report", "out")])
def test_scores_are_no_texts(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("score", str(SAMPLES), "-o", "out", "-q", "--kv-memory", "64MiB").exit_code == 0
    refused = invoke(*command)
    assert (refused.exit_code, "out holds scores, and this is for generated texts" in refused.stderr) == (2, True)
