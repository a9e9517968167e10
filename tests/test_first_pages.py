"""The pages of docs/first: each of their commands runs, and prints what the page shows.

Where a page has a model, the embedded one stands in its place. What needs another service or package is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import written
from helpers.gguf_files import made, plain_tokenizer

pytestmark = pytest.mark.usefixtures("kept_models")

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "first").glob("*.md"))
_ELSEWHERE = ("pip ", "docker ", "sbatch ", "python -m detgen.integrations.lm_eval ")
_SHELL = re.compile(r"[|&;<>]|^\w+=")


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page, and the lines that stand below each."""
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        for part in re.split(r"^    \$ ", block, flags=re.MULTILINE):
            command, *shown = (line.removeprefix("    ") for line in part.splitlines() or [""])
            if command and f"$ {command}" in text:
                yield command, shown


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_models: Any) -> Path:
    """A folder with prompts, models, and a `detgen` for shells."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(ROOT / "sample_prompts", folder / "sample_prompts")
    hugging_face = Path(shutil.copytree(demo_models.target, folder / "models" / "SmolLM2-135M-Instruct"))
    plain = plain_tokenizer(Path(shutil.copytree(hugging_face, folder / "plain")))
    made(plain, folder / "models" / "model-Q4_K_M.gguf", lambda _: "Q8_0")
    (folder / "bin").mkdir()
    for name, words in (("detgen", "-m detgen"), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    return folder


def outcome(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of a command, and what it prints. A plain one runs in this process, which is faster."""
    if command.startswith("detgen ") and not _SHELL.search(command.replace("$'", "'")):
        script = f"printf '%s\\0' {command.removeprefix('detgen ')}"
        words = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
        return written(capfd, *words)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_page(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    text, printed = path.read_text("utf-8"), ""
    assert len(text.splitlines()) <= 60
    for out in [*place.glob("*.csv"), *place.glob("*.parquet"), *(p.parent for p in place.glob("*/manifest.json"))]:
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    ran = 0
    for command, shown in commands(text):
        if command.startswith(_ELSEWHERE):
            continue
        status, output = outcome(command, place, capfd)
        assert status == 0, f"{command}\n{output}"
        for line in shown:
            assert line in output, f"{command}\n{output}"
        printed, ran = printed + output, ran + 1
    assert ran >= 5
    for digest in re.findall(r"SHA-256 of outputs.jsonl  \w+", text):
        assert digest in printed


def test_each_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert len(PAGES) == 6
    assert all(f"first/{path.stem}" in index for path in PAGES)
