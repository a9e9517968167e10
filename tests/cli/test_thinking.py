"""The commands for a model that thinks, as a user types them, and what the command line refuses."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import thorough, usual
from helpers.tampering import edit_lines, renew
from typer.testing import CliRunner, Result

from detgen.cli import app

RUNNER = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"})
STORIES = Path(__file__).parents[2] / "sample_prompts" / "coin_flips.jsonl"
FLIPS = ["run", str(STORIES), "--target", "demo-thinking"]

# How the model reads the first story, as docs/run_thinking.md shows it.
DRAWN = """\
tokens  chunk                   state of  thought
0-3     "A coin's state"        -         -
4-7     " is heads. Alice"      -         " heads"
8-11    " flips, then Bob"      " heads"  " tails"
12-15   " flips. What's"        " tails"  " heads"
16-19   " the state? A"         " heads"  -
20-22   ": heads<|endoftext|>"  " heads"  -
"""


def detgen(*arguments: str) -> Result:
    return RUNNER.invoke(app, list(arguments))


@pytest.fixture(scope="module")
def flips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The first run, and what it showed."""
    out = tmp_path_factory.mktemp("thinking") / "flips"
    return out, detgen(*FLIPS, "-o", str(out), "--max-tokens", "4", "--show-thoughts")


def test_the_first_story(flips: tuple[Path, Result]) -> None:
    out, result = flips
    assert result.exit_code == 0, result.output
    drawn, _, summary = result.stdout.partition("\n\n")
    assert f"{drawn}\n" == DRAWN
    page = (Path(__file__).parents[2] / "docs" / "run_thinking.md").read_text(encoding="utf-8")
    assert textwrap.indent(DRAWN, "    ") in page
    thoughts = re.search(
        r"^thoughts +([\d,]+) written, ([\d,]+) chunks, ([\d,]+) prefill rounds, ([\d,]+) passes saved$", summary, re.M
    )
    assert thoughts is not None, summary
    written, chunks, rounds, saved = (int(count.replace(",", "")) for count in thoughts.groups())
    lines = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    assert written == sum(len(line["thoughts"]) for line in lines) > 500
    assert chunks == sum((line["prompt_tokens"] + line["completion_tokens"] - 1) // 4 for line in lines)
    assert 0 < rounds < chunks
    assert saved > 0  # how far it reads ahead depends on what a pass costs
    assert len(lines) == 64
    assert lines[0]["text"] == " heads"
    assert lines[0]["thoughts"] == [[4, " heads"], [8, " tails"], [12, " heads"]]
    asked = [json.loads(line) for line in STORIES.read_text().splitlines()]
    right = [line["text"].strip() == story["answer"] for line, story in zip(lines, asked, strict=True)]
    assert sum(right) >= 63


def test_chunk_by_chunk_alone(flips: tuple[Path, Result], tmp_path: Path) -> None:
    """The same lines; and none of the passes is saved."""
    out = tmp_path / "flips2"
    options = ["--batch-size", "1", "--speculative-prefill", "off", "--limit", "12", "--max-tokens", "4"]
    result = detgen(*FLIPS, "-o", str(out), *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"^thoughts .* 0 passes saved$", result.stdout, re.M)
    assert "tokens  chunk" not in result.stdout
    same = (flips[0] / "outputs.jsonl").read_text().splitlines()[:12]
    assert (out / "outputs.jsonl").read_text().splitlines() == same
    assert json.loads((out / "manifest.json").read_text())["settings"]["speculative_prefill"] == "off"


def test_a_finished_run_shows_its_thoughts_again(flips: tuple[Path, Result]) -> None:
    """And may have been read ahead in another way."""
    again = [*FLIPS, "-o", str(flips[0]), "--max-tokens", "4", "--speculative-prefill", "2"]
    result = detgen(*again, "--show-thoughts")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(DRAWN)
    assert "already finished" in result.stdout
    assert "written" not in result.stdout
    assert not detgen(*again).stdout.startswith("tokens")
    assert detgen(*again, "--show-thoughts", "-q").stdout == ""


@pytest.mark.parametrize("command", usual([["audit"]], [["verify-determinism", "--against"]]))
def test_audit(flips: tuple[Path, Result], command: list[str]) -> None:
    result = detgen(*command, str(flips[0]))
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("nothing differs\n")


def test_audit_of_a_tampered_run(flips: tuple[Path, Result], tmp_path: Path) -> None:
    shutil.copytree(flips[0], tmp_path / "out")

    def other(lines: list[dict[str, Any]]) -> None:
        lines[0]["thoughts"][1][1] = " heads"

    edit_lines(tmp_path / "out" / "outputs.jsonl", other)
    renew(tmp_path / "out")
    result = detgen("audit", str(tmp_path / "out"), "-q")
    assert result.exit_code == 1, result.output
    said = "outputs.jsonl:1: thoughts[1] is [8, ' heads'], should be [8, ' tails']"
    assert result.stdout.splitlines()[0] == said


@thorough
def test_verify_determinism_of_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["verify-determinism", "--target", "demo-thinking", "--axis", "speculative-prefill", "--limit", "4"]
    result = detgen(*command, "--json", "r.json")
    assert result.exit_code == 0, result.output
    assert re.search(r"^speculative prefill +off 1 3 auto whole\sprompt ", result.stdout, re.M)
    assert "chunks equal" in result.stdout
    assert result.stdout.endswith("every bit equal\n")
    counts = json.loads(Path("r.json").read_text())["total"]
    assert counts["chunks_equal"] == counts["chunks"] > 100


# What is refused


@pytest.mark.parametrize(
    "arguments", [["--speculative-prefill", "3"], ["--speculative-prefill", "off"], ["--show-thoughts"]], ids=str
)
def test_a_model_that_does_not_think(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "p.txt").write_text("def f\n")
    result = detgen("run", str(tmp_path / "p.txt"), "-o", str(tmp_path / "out"), "-q", *arguments)
    assert result.exit_code == 2
    why = "is for models that think while they read, and embedded:target does not; leave it out"
    assert result.stderr == f"detgen: error: {arguments[0]} {why}\n"


def test_a_draft_model_with_another_vocabulary(tmp_path: Path, demo_models: Any) -> None:
    command = [*FLIPS, "-o", str(tmp_path / "out"), "--drafter", "model", "-q"]
    result = detgen(*command, "--draft", str(demo_models.draft))
    assert result.exit_code == 2
    assert "vocabular" in result.stderr
    assert str(demo_models.draft) in result.stderr
    result = detgen(*command)
    assert result.exit_code == 2
    assert "--drafter model needs a draft model" in result.stderr


def test_the_axis_of_a_model_that_does_not_think(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = detgen("verify-determinism", "--axis", "speculative-prefill", "--limit", "2", "-q")
    assert result.exit_code == 2
    assert "the axis speculative-prefill has only one value here" in result.stderr


def test_bench(tmp_path: Path) -> None:
    result = detgen("bench", "--target", "demo-thinking", "-o", str(tmp_path / "bench"))
    assert result.exit_code == 2
    assert "demo-thinking thinks while it reads, which no other program does" in result.stderr
