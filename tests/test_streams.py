"""Standard streams that cannot be written do not end a command, and lend their numbers to no other file."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.examples import usual

CODE = f"""if True:
    import os, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from helpers.fakes import FakeEngine
    import detgen.run.lifecycle
    class Engine(FakeEngine):
        def profile(self):
            os.write(2, b"what a library says")  # would end up in a file that had got the number
            return super().profile()
    detgen.run.lifecycle.load_engine = Engine
    from detgen.__main__ import main
    main()
"""


def shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of detgen whose streams are redirected by a shell."""
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *command], capture_output=True, text=True, check=False
    )


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return ["run", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "out"), "--max-tokens", "2"]


@pytest.mark.parametrize(
    "redirections", ["2>/dev/full", "2>&-", ">/dev/full", ">&-", ">&- 2>&- <&-", ">/dev/full 2>&1"]
)
def test_a_run_goes_on(tmp_path: Path, run: list[str], redirections: str) -> None:
    done = shell(redirections, *run)
    assert done.returncode == 0, done
    out = tmp_path / "out"
    assert json.loads((out / "manifest.json").read_text())["status"] == "finished"
    assert json.loads((out / "outputs.jsonl").read_text())["id"] == 1
    assert not any(b"what a library says" in path.read_bytes() for path in out.iterdir())
    if redirections == ">/dev/full":
        assert done.stderr.endswith("detgen: error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize(
    ("wrong", "redirections"),
    usual(
        [
            (["--top-p", "2"], "2>/dev/full"),
            (["--limit", "x"], ">/dev/full 2>&1"),
            (["--no-such-option"], "2>&-"),
            (["--target", "./nowhere"], "2>/dev/full"),
        ],
        itertools.product(
            (["--limit", "x"], ["--no-such-option"], ["--target", "./nowhere"]),
            ("2>/dev/full", "2>&-", ">/dev/full 2>&1"),
        ),
    ),
)
def test_a_refusal_keeps_its_exit_status(run: list[str], wrong: list[str], redirections: str) -> None:
    assert shell(redirections, *run, *wrong).returncode == 2


def test_help_that_cannot_be_written(run: list[str]) -> None:
    done = shell(">/dev/full", "run", "--help")
    assert (done.returncode, done.stderr) == (
        0,
        "detgen: error: cannot write to standard output: No space left on device\n",
    )


def test_a_reader_who_leaves_is_not_told(run: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "run", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
