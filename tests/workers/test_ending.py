"""Runs on workers that are killed or interrupted: nothing is left behind, and the same command goes on."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.examples import thorough
from helpers.fakes import Watcher, content, kept_in
from helpers.real_workers import (
    ENGINE,
    PARAMS,
    RAY,
    alive,
    family,
    one_process,
    wait_for,
    workers,
    write_prompts,
)

from detgen.run import RunConfig, run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores"),
]

OPTIONS = ("--batch-size=4", "--kv-memory=64MiB", "--max-tokens=24", "--workers=2")


@thorough
def test_a_run_whose_coordinator_is_killed_or_interrupted_resumes(tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 240), tmp_path / "out"
    alone = one_process(prompts, tmp_path / "one")
    command = [sys.executable, "-m", "detgen", "run", str(prompts), "-o", str(out), *OPTIONS]
    samples = 0
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        wait_for(lambda before=samples: kept_in(out) > before + 20)  # type: ignore[misc]
        started = family(process.pid)
        assert len(workers(started)) == 2
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)  # as a terminal does
        printed, said = process.communicate(timeout=120)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), said
        assert printed == b""
        assert b"ray" not in said, said
        assert (b"to resume, run the same command again" in said) == (number == signal.SIGINT)
        # Two helpers of Ray's own look about for a minute when all others have been killed.
        names = RAY if number == signal.SIGKILL else ()
        wait_for(lambda started=started, names=names: not alive(started, *names))  # type: ignore[misc]
        assert kept_in(out) > samples
        samples = kept_in(out)
    assert samples < alone["outputs.jsonl"].count(b"\n")
    summary = run(RunConfig(str(prompts), out, PARAMS, ENGINE), Watcher())
    assert summary.resumed >= 20
    assert content(out)["outputs.jsonl"] == alone["outputs.jsonl"]
