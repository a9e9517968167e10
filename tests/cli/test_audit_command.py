"""`detgen audit` and its alias: exit codes, messages, and the result as JSON."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from helpers.checks import Silent
from typer.testing import CliRunner

from detgen import Engine, EngineConfig, SamplingParams
from detgen.cli import app
from detgen.program.operands import ARITHMETIC
from detgen.run import RunConfig, run
from detgen.verify.replay import audit

RUNNER = CliRunner()
PROMPTS = '{"prompt": "def add(a, b):\\n", "max_tokens": 8}\n{"prompt": "import os\\n", "max_tokens": 8}\n'
COMMANDS = [["audit"], ["verify-determinism", "--against"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    (folder / "prompts.jsonl").write_text(PROMPTS)
    config = RunConfig(str(folder / "prompts.jsonl"), folder / "out", SamplingParams(), EngineConfig())
    run(config, Silent(), build_engine=lambda _: engine)
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> str:
    """A copy of a run's folder, to be tampered with; the commands find the engine of the other tests."""
    monkeypatch.setattr(audit, "Engine", lambda config, **_: engine)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "out")
    return "out"


@pytest.mark.parametrize("command", COMMANDS)
def test_untouched(out: str, command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, out, "--json", "r.json"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("out: 2 samples, 16 tokens at ")
    assert result.stdout.endswith(": nothing differs\n")
    assert "detgen: 2 samples, 0 faults" in result.stderr
    found = json.loads(Path("r.json").read_text())
    assert (found["equal"], found["tokens"]) == (True, 16)
    assert RUNNER.invoke(app, [*command, out, "-q"]).output == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_tampered(out: str, command: list[str]) -> None:
    """Each fault on a line, and exit status 1."""
    path = Path("out/outputs.jsonl")
    lines = path.read_text().splitlines()
    line = json.loads(lines[1])
    line["token_ids"][0] += 1
    path.write_text("\n".join([lines[0], json.dumps(line)]) + "\n")
    result = RUNNER.invoke(app, [*command, out, "--json", "r.json"])
    assert result.exit_code == 1
    assert "outputs.jsonl:2: token 0 is " in result.stdout
    assert "the manifest says" in result.stdout
    found = json.loads(Path("r.json").read_text())
    assert not found["equal"]
    assert found["faults"] > found["differing"] > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_prompts_elsewhere(out: str, command: list[str]) -> None:
    """They are asked for, and taken if their digest is that of the run."""
    manifest = json.loads(Path("out/manifest.json").read_text())
    manifest["input"]["path"] = "gone.jsonl"
    Path("out/manifest.json").write_text(json.dumps(manifest))
    result = RUNNER.invoke(app, [*command, out])
    assert result.exit_code == 2
    assert "name them as PROMPTS" in result.stderr
    Path("moved.jsonl").write_text(PROMPTS)
    assert manifest["input"]["sha256"] == hashlib.sha256(PROMPTS.encode()).hexdigest()
    assert RUNNER.invoke(app, [*command, out, "moved.jsonl"]).exit_code == 0
    Path("moved.jsonl").write_text(PROMPTS + PROMPTS)
    result = RUNNER.invoke(app, [*command, out, "moved.jsonl"])
    assert result.exit_code == 1
    assert "the input's SHA-256 is" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_no_run(tmp_path: Path, command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, str(tmp_path)])
    assert result.exit_code == 2
    assert "has no manifest.json; give the output folder of a detgen run" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [*COMMANDS, ["run", "prompts.jsonl", "-o"]])
def test_a_run_of_another_arithmetic_is_refused(out: str, command: list[str]) -> None:
    """Audited and resumed."""
    manifest = json.loads(Path("out/manifest.json").read_text())
    manifest["profile"]["arithmetic"] = "detgen-1"
    Path("out/manifest.json").write_text(json.dumps(manifest))
    Path("prompts.jsonl").write_text(PROMPTS)
    result = RUNNER.invoke(app, [*command, out])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"was made by the arithmetic detgen-1; this detgen computes {ARITHMETIC}" in result.stderr.splitlines()[-1]


def test_wrong_usage(out: str) -> None:
    assert RUNNER.invoke(app, ["audit"]).exit_code == 2
    assert RUNNER.invoke(app, ["audit", out, "--draft", "d"]).exit_code == 2
    assert RUNNER.invoke(app, ["audit", out, "--json", "nowhere/r.json"]).exit_code == 2
