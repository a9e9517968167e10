"""Real runs on real workers, which are killed, and so is their coordinator: the same bytes, and nobody is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers.fakes import content, kept_in
from helpers.real_workers import RAY, alive, family, one_process, wait_for, workers, write_prompts

pytestmark = pytest.mark.slow

OPTIONS = ("--batch-size=4", "--kv-memory=64MiB", "--max-tokens=24", "--workers=2", "--quiet")


def _start(prompts: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "detgen", "run", str(prompts), "-o", str(out), *OPTIONS]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str], status: int) -> None:
    _, said = process.communicate()
    assert process.returncode == status, said
    assert "Traceback" not in said


def test_workers_that_are_killed_are_replaced(
    tmp_path: Path, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 3000), tmp_path / "out"
    alone = one_process(prompts, tmp_path / "one")
    draw = random.Random(5)
    kills = 0
    process = _start(prompts, out)
    wait_for(lambda: kept_in(out))
    while kills < tries(5):
        time.sleep(draw.uniform(0, 4))
        assert process.poll() is None, "it ended before all kills"
        if running := workers(family(process.pid)):
            os.kill(draw.choice(running), signal.SIGKILL)
            kills += 1
    _end(process, 0)
    assert content(out)["outputs.jsonl"] == alone["outputs.jsonl"]
    tally(kills=kills, differing=0)


def test_a_coordinator_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 1500), tmp_path / "out"
    alone = one_process(prompts, tmp_path / "one")
    draw = random.Random(6)
    all_of_them: list[psutil.Process] = []
    for _ in range(tries(5)):
        before = kept_in(out)
        process = _start(prompts, out)
        wait_for(lambda before=before: kept_in(out) > before)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.5))
        started = family(process.pid)
        process.kill()
        _end(process, -9)
        wait_for(lambda started=started: not alive(started, *RAY))  # type: ignore[misc]
        all_of_them += started
    _end(_start(prompts, out), 0)
    assert content(out)["outputs.jsonl"] == alone["outputs.jsonl"]
    wait_for(lambda: not alive(all_of_them))
    tally(kills=tries(5), differing=0)
