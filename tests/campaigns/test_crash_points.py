"""A run that dies at any of its calls on files, SQLite's own among them: the same command goes on to the same bytes.

What a run does to its files is written down once, call by call (`helpers.file_calls`); a crash is a prefix of that.
Three ways to die: before a call; in the middle of a write; and with the machine, which keeps what was synced, and of
the rest any sectors.
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.crash_scenarios import REFUSED, SCENARIOS, act
from helpers.fakes import keys_in, manifest_of
from helpers.file_calls import Call, Death, Disk, content_of, crash, library, record

from detgen.errors import OutputError, RunError
from detgen.run import RunSummary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD"),
]

POINTS = 1000
TIMED = ("manifest.json", "samples.sqlite3", "samples-damaged.sqlite3")  # have times in them, or may be there
AGAIN = 0.2  # of the points are followed by another crash, of the run that resumes
DEATHS: tuple[Death, ...] = ("killed", "torn", "power")


def _lines_are_kept(out: Path, kept: set[bytes]) -> bool:
    """Whether the store has as many samples as the output file of an unfinished run."""
    path = out / "outputs.jsonl"
    if not path.exists() or manifest_of(out)["status"] == "finished":
        return True
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return sum(b"\0" not in line and b'"error"' not in line for line in whole.splitlines()) <= len(kept)


def test_a_run_that_dies_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # put back at the end
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    draw, shim, folder = random.Random(13), library(tmp_path), tmp_path / "folder"
    out = folder / "out"
    points = tried = again = refused = 0

    def recorded(name: str) -> tuple[Disk, list[Call]]:
        before, statuses = Disk(folder), (0, REFUSED) if SCENARIOS[name].refuses else (0,)
        return before, record(shim, folder, ("-m", "helpers.crash_scenarios", name, str(folder)), statuses)

    def resumed(name: str) -> RunSummary:
        nonlocal refused
        try:
            return act(name, folder)
        except (OutputError, RunError) as error:
            if not SCENARIOS[name].refuses or "run the same command again" not in str(error):
                raise
            refused += 1
            return act(name, folder)

    def die(before: Disk, calls: list[Call]) -> str:
        at, death, seed = draw.randrange(len(calls)), draw.choice(DEATHS), draw.randrange(1 << 30)
        crash(copy.deepcopy(before), calls, at, death, seed)
        return f"{death} at call {at} of {len(calls)} ({calls[at].what} {seed})"

    for name, scenario in SCENARIOS.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        scenario.prepare(folder)
        before, calls = recorded(name)
        points += len(DEATHS) * len(calls)
        expected, wanted = content_of(out), keys_in(out)
        for _ in range(max(tries(POINTS) // len(SCENARIOS), 1)):
            wrong = f"{name}, {die(before, calls)}"
            tried += 1
            kept = keys_in(out) & wanted
            assert not scenario.kept or _lines_are_kept(out, kept), wrong
            if draw.random() < AGAIN:
                wrong += f", then {die(*recorded(name))}"
                again += 1
                now = keys_in(out) & wanted
                assert not scenario.kept or "power" in wrong or kept <= now, wrong
                kept = now
            summary = resumed(name)
            if scenario.kept and summary.status != "already finished":
                assert len(kept) <= len(wanted) - summary.fresh.samples, wrong
            left = content_of(out)
            assert {**left, **dict.fromkeys(TIMED, b"")} == {**expected, **dict.fromkeys(TIMED, b"")}, wrong
            assert manifest_of(out)["status"] == "finished", wrong
            assert keys_in(out) == wanted, wrong
    counts = {"tried": tried, "in_resumptions_of_these": again, "refused_once": refused}
    tally(crash_points=points, **counts, differing=0, tracebacks=0)
