"""detgen score: every option arrives, and results and errors go where they belong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import SUMMARY, RunWith, invoke

from detgen.engine.config import EngineConfig
from detgen.outputs import Totals
from detgen.run import ScoreConfig

SAMPLES = Path(__file__).parents[2] / "sample_prompts" / "scores.jsonl"


def test_defaults_are_those_of_the_api(run_with: RunWith) -> None:
    result, config = run_with("p.jsonl", command="score")
    assert result.exit_code == 0, result.output
    assert config == ScoreConfig("p.jsonl", None, EngineConfig(drafter="none"))


def test_every_option_arrives(run_with: RunWith) -> None:
    result, config = run_with(
        *("-", "-o", "folder", "--target", "T", "--device", "cuda:1", "--dtype", "bf16", "--target-quant", "q8"),
        *("--batch-size", "6", "--threads", "1", "--kv-memory", "4GiB", "--kv-dtype", "f32", "--prefix-cache", "off"),
        *("--speculative-prefill", "3", "--prompt-column", "q", "--echo", "--limit", "9", "--overwrite", "--strict"),
        *("--quiet", "--trust-remote-code"),
        command="score",
    )
    assert result.exit_code == 0, result.output
    engine = EngineConfig(
        target="T",
        drafter="none",
        batch_size=6,
        device="cuda:1",
        dtype="bfloat16",
        kv_dtype="float32",
        target_quant="q8",
        threads=1,
        kv_memory=4 * 2**30,
        prefix_cache=False,
        speculative_prefill=3,
        trust_remote_code=True,
    )
    assert config == ScoreConfig("-", Path("folder"), engine, 9, True, "q", True)


def test_it_ends_as_a_run_does(run_with: RunWith) -> None:
    failed = replace(SUMMARY, written=Totals(prompts=2, samples=1, errors=1, tokens=3))
    assert run_with("p.jsonl", command="score", outcome=failed)[0].exit_code == 0
    assert run_with("p.jsonl", "--strict", command="score", outcome=failed)[0].exit_code == 1
    interrupted, _ = run_with("p.jsonl", "--overwrite", command="score", outcome=KeyboardInterrupt())
    assert interrupted.exit_code == 130
    assert interrupted.stderr.splitlines()[-1].strip() == "detgen score p.jsonl"


def test_wrong_usage(tmp_path: Path) -> None:
    assert invoke("score", str(tmp_path / "none.jsonl")).exit_code == 2
    assert invoke("score", "p.jsonl", "--temperature", "1").exit_code == 2


def test_the_sample_is_scored_and_passes_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed in the folder is found, and it is refused where texts are needed."""
    monkeypatch.chdir(tmp_path)
    done = invoke("score", str(SAMPLES), "-o", "out", "-q", "--kv-memory", "64MiB")
    assert done.exit_code == 0, done.output
    assert invoke("audit", "out", "-q").exit_code == 0
    for command in (("export", "out", "--to", "csv"), ("report", "out")):
        refused = invoke(*command)
        assert (refused.exit_code, "out holds scores, and this is for generated texts" in refused.stderr) == (2, True)
    outputs = tmp_path / "out" / "outputs.jsonl"
    text = outputs.read_text()
    outputs.write_text(text.replace(str(json.loads(text.splitlines()[0])["logprob"]), "-1.0"))
    found = invoke("audit", "out", "-q")
    assert found.exit_code == 1
    assert "outputs.jsonl:1: logprob is -1.0" in found.stdout
