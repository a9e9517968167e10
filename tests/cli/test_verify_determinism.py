"""The command: its forms, exit codes, messages and the files that it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detgen.cli import app
from detgen.determinism.observing import Watching
from detgen.models import DEMO

RUNNER = CliRunner()
PROMPTS = '{"prompt": "def add(a, b):\\n", "max_tokens": 8}\n{"prompt": "import os\\n", "max_tokens": 8}\n'


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


def test_one_axis(prompts: Path) -> None:
    """A table with the axis, one line to quote, and the same as JSON."""
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "threads", "-q", "--json", "r.json"])
    assert result.exit_code == 0, result.output
    *_, last = result.output.strip().splitlines()
    found = json.loads(Path("r.json").read_text())
    assert last == f"{found['total']['settings']} settings, {found['total']['positions']:,} positions: every bit equal"
    assert "threads" in result.output
    assert found["equal"] is True
    assert found["total"]["positions"] == found["total"]["entries_equal"] > 0
    assert found["axes"]["threads"]["tried"][0] == "all"


def test_difference_is_shown_and_replayed(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, the finding on the screen, a file that shows it again; once mended, the file says so and exits with 0."""
    watched = Watching.committed

    def faulty(self: Watching, seq: object, first: int, logits: object) -> None:
        slot = seq.slot  # type: ignore[attr-defined]
        watched(self, seq, first, logits + slot)  # type: ignore[arg-type, operator]

    monkeypatch.setattr(Watching, "committed", faulty)
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "batch", "-q", "--save", "d.json"])
    assert result.exit_code == 1, result.output
    assert "settings differ" in result.output
    assert re.search(r"smallest setting +batch size 2", result.output)
    assert "every module agrees at this row" in result.output
    again = RUNNER.invoke(app, ["verify-determinism", "--replay", "d.json", "-q"])
    assert again.exit_code == 1, again.output
    assert "smallest setting" in again.output
    monkeypatch.undo()
    monkeypatch.chdir(prompts.parent)
    again = RUNNER.invoke(app, ["verify-determinism", "--replay", "d.json", "-q"])
    assert again.exit_code == 0, again.output
    assert "every bit equal" in again.output


def test_against(prompts: Path) -> None:
    """A run passes; with one token changed it does not."""
    assert RUNNER.invoke(app, ["run", str(prompts), "-o", "out", "-q"]).exit_code == 0
    result = RUNNER.invoke(app, ["verify-determinism", "--against", "out", "--json", "r.json"])
    assert result.exit_code == 0, result.output
    assert "nothing differs" in result.output
    assert json.loads(Path("r.json").read_text())["tokens"] > 0

    moved = prompts.rename(prompts.with_name("elsewhere.jsonl"))
    result = RUNNER.invoke(app, ["verify-determinism", "--against", "out"])
    assert result.exit_code == 2
    assert "give them as PROMPTS" in result.output
    assert RUNNER.invoke(app, ["verify-determinism", str(moved), "--against", "out"]).exit_code == 0

    path = Path("out/outputs.jsonl")
    lines = path.read_text().splitlines()
    line = json.loads(lines[1])
    line["token_ids"][0] += 1
    path.write_text("\n".join([lines[0], json.dumps(line)]) + "\n")
    result = RUNNER.invoke(app, ["verify-determinism", str(moved), "--against", "out"])
    assert result.exit_code == 1
    assert "outputs.jsonl:2: differs token 0: " in result.output
    assert "the manifest says" in result.output


def test_probe() -> None:
    result = RUNNER.invoke(app, ["verify-determinism", "--probe"])
    assert result.exit_code == 0, result.output
    assert "attention" in result.output
    assert "Canonical passes may have" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "weather"], "no axis 'weather'; the axes are batch, order"),
        (["--probe", "--contrast"], "--probe and --contrast cannot be given together"),
        (["--against", "nowhere"], "nowhere holds no manifest.json"),
        (["--replay", "nowhere.json"], "cannot read nowhere.json"),
        (["--replay", "prompts.jsonl"], "no reproduction file"),
        (["nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--target", "nowhere"], "cannot load the model nowhere"),
    ],
)
def test_refused(prompts: Path, arguments: list[str], message: str) -> None:
    """Exit 2 with one line that names what is wrong."""
    result = RUNNER.invoke(app, ["verify-determinism", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_help_is_quick_and_complete() -> None:
    """No heavy library is imported for the help."""
    code = "import sys; from detgen.cli import main; sys.argv = ['detgen', 'verify-determinism', '--help']\n"
    code += "try: main()\nfinally: assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for option in ("--against", "--probe", "--contrast", "--replay", "--full", "--minutes", "--axis", "--json"):
        assert option in done.stdout


def test_embedded_prompts_are_the_sample_prompts() -> None:
    """The package carries a copy of the sample prompts, since an installed one has no folder beside it."""
    samples = Path(__file__).parents[2] / "sample_prompts" / "code.jsonl"
    assert (DEMO / "prompts.jsonl").read_bytes() == samples.read_bytes()
