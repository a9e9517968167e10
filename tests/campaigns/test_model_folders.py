"""Model folders of strangers: none runs its code, ends in a traceback, hangs, or takes the machine's memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.model_folders import ALL, BadFolder
from typer.testing import CliRunner

from detgen.cli import app

pytestmark = pytest.mark.slow

YES = "y\n" * 100
SECONDS = 120.0  # for one command, on a machine that does other things too; a template alone may take ten
MEMORY = 3 << 30  # bytes that a command may take at most
CHAT = '{"messages": [{"role": "user", "content": "def f("}]}\n'
TEXT = '{"prompt": "def f("}\n'


def chosen(tries: Callable[[int], int]) -> list[BadFolder]:
    """As many of the folders as this campaign tries, spread evenly."""
    step = len(ALL) / tries(len(ALL))
    return [ALL[int(i * step)] for i in range(tries(len(ALL)))]


def faults(case: BadFolder, status: int, errors: str, canary: Path, outputs: Path) -> list[str]:
    """What is wrong with the end of a command."""
    found = []
    lines = errors.splitlines()
    wrong = [line for line in lines if line.startswith("detgen: error: ")]
    if canary.exists():
        found.append("code ran")
    if "Traceback" in errors or not all(line.startswith("detgen: ") for line in lines):
        found.append(f"more than detgen's own lines: {errors!r}")
    if status != case.status:
        found.append(f"exit status {status}: {errors!r}")
    if case.status == 2 and (len(wrong) != 1 or case.said not in wrong[0]):
        found.append(f"said {wrong!r}")
    if case.status != 2 and case.said and case.said not in outputs.read_text():
        found.append(f"wrote {outputs.read_text()!r}")
    if any(not c.isprintable() for line in lines for c in line):
        found.append(f"control characters: {errors!r}")
    return found


@pytest.fixture
def make(demo_models: Any, tmp_path: Path) -> Callable[[BadFolder], Path]:
    """Makes a folder from the embedded draft model."""

    def make(case: BadFolder) -> Path:
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        folder = tmp_path / "case" / "model"
        shutil.copytree(demo_models.draft, folder)
        case.damage(folder, tmp_path / "canary")
        (tmp_path / "case" / "prompts.jsonl").write_text(CHAT + TEXT)
        return folder

    return make


def run_options(folder: Path) -> list[str]:
    place = folder.parent
    return [
        *("run", str(place / "prompts.jsonl"), "-o", str(place / "out"), "--target", str(folder)),
        *("--drafter", "none", "--max-tokens", "2", "--batch-size", "2", "--kv-memory", "8MB"),
    ]


def test_in_this_process(
    tries: Callable[[int], int], tally: Callable[..., None], make: Callable[[BadFolder], Path], tmp_path: Path
) -> None:
    """Every folder, by the command line's own code."""
    found: dict[str, list[str]] = {}
    slowest = 0.0
    for case in chosen(tries):
        folder = make(case)
        started = time.monotonic()
        result = CliRunner().invoke(app, run_options(folder), input=YES)
        slowest = max(slowest, time.monotonic() - started)
        wrong = faults(case, result.exit_code, result.stderr, tmp_path / "canary", folder.parent / "out/outputs.jsonl")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            wrong.append(f"raised {result.exception!r}")
        if wrong:
            found[case.name] = wrong
        (tmp_path / "canary").exists() and (tmp_path / "canary").rmdir()
    tally(folders=len(chosen(tries)), not_refused_well=len(found), slowest_seconds=round(slowest))
    assert not found, "\n".join(f"{name}: {wrong}" for name, wrong in found.items())
    assert slowest < SECONDS


def test_in_processes(
    tries: Callable[[int], int], tally: Callable[..., None], make: Callable[[BadFolder], Path], tmp_path: Path
) -> None:
    """Some of them as a person runs them: with little memory, and with "y" on standard input."""
    cases = [case for case in ALL if case in chosen(tries)][:: max(len(ALL) // 40, 1)]
    found: dict[str, list[str]] = {}
    for case in cases:
        folder = make(case)
        started = time.monotonic()
        status, errors, _ = command(*run_options(folder))
        wrong = faults(case, status, errors, tmp_path / "canary", folder.parent / "out/outputs.jsonl")
        if time.monotonic() - started > SECONDS:
            wrong.append(f"took {time.monotonic() - started:.0f} s")
        if wrong:
            found[case.name] = wrong
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    tally(processes=len(cases), not_refused_well=len(found), largest_MiB=largest >> 10)
    assert not found, "\n".join(f"{name}: {wrong}" for name, wrong in found.items())
    assert largest << 10 < MEMORY


def test_audits(
    tries: Callable[[int], int], tally: Callable[..., None], make: Callable[[BadFolder], Path], tmp_path: Path
) -> None:
    """An audit loads the model that a stranger's manifest names."""
    good = BadFolder("good", lambda *_: None, "", 0)
    folder = make(good)
    status, errors, _ = command(*run_options(folder))
    assert status == 0, errors
    shutil.copytree(folder.parent / "out", tmp_path / "run")
    cases = [case for case in chosen(tries) if case.status == 2][::8]
    found: dict[str, list[str]] = {}
    for case in cases:
        folder = make(case)
        shutil.copytree(tmp_path / "run", folder.parent / "out")
        path = folder.parent / "out" / "manifest.json"
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "model": str(folder)}))
        status, errors, _ = command("audit", str(folder.parent / "out"), str(folder.parent / "prompts.jsonl"))
        if wrong := faults(case, status, errors, tmp_path / "canary", path):
            found[case.name] = wrong
    tally(audits=len(cases), not_refused_well=len(found))
    assert not found, "\n".join(f"{name}: {wrong}" for name, wrong in found.items())


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard error and standard output of a real process."""
    done = subprocess.run(
        [sys.executable, "-m", "detgen", *arguments],
        input=YES,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stderr, done.stdout
