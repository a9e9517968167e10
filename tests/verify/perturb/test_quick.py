"""The command as a user runs it, of a sound detgen and of broken ones: most faults are found within a minute.

Slow: `pytest -m slow` takes half an hour, and the minute is that of two cores which nobody else uses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import faults
from helpers.families import DESCRIBED
from helpers.snapshot_faults import SNAPSHOT_FAULTS
from helpers.thinking_faults import THINKING_FAULTS

pytestmark = pytest.mark.slow

MINUTE = 60.0
SOUND = [sys.executable, "-m", "detgen"]
THINKING = ["--target", "demo-thinking"]


def _quick(program: list[str], folder: Path, *options: str, most: float = MINUTE) -> subprocess.CompletedProcess[str]:
    """The quick check in an environment as a user has it, within that many seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [*program, "verify-determinism", "-q", "--json", "result.json", *options]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - started
    assert seconds < most, f"{seconds:.1f} s: {done.stdout}"
    return done


def test_sound_engine(tmp_path: Path) -> None:
    done = _quick(SOUND, tmp_path, most=2 * MINUTE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("every bit equal")
    assert json.loads((tmp_path / "result.json").read_text())["kills"] == 1


@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_fault(fault: str, tmp_path: Path) -> None:
    """Found, shrunk and looked into; the finding can be replayed."""
    most = 3 * MINUTE if fault in faults.LATE else MINUTE
    done = _quick([sys.executable, faults.__file__, fault], tmp_path, most=most)
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (
        r"prompt +[\w ]+, sample \d+: '.+",
        r"position +\d+ \((token \d+ of the completion\)\ntokens +reference .+, here .+|within the prompt\))",
        r"smallest setting +.+ \(\d+ prompts\)",
        r"first module +.+",
    ):
        assert re.search(rf"^{line}$", done.stdout, re.MULTILINE), (line, done.stdout)
    (finding,) = json.loads((tmp_path / "result.json").read_text())["findings"]
    assert finding["error"] is None
    # A reference differs from itself if it counts what the last sequence left in its pages; else shrinking is wrong.
    assert finding["setting"] or fault == "truncation_off_by_one"
    assert (tmp_path / "detgen-difference.json").exists()


def test_sound_engine_of_a_model_that_thinks(tmp_path: Path) -> None:
    done = _quick(SOUND, tmp_path, *THINKING, most=2 * MINUTE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("every bit equal")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["kills"] == 1
    assert result["total"]["chunks_equal"] == result["total"]["chunks"] > 10_000


@pytest.mark.parametrize("fault", sorted(THINKING_FAULTS))
def test_fault_of_a_model_that_thinks(fault: str, tmp_path: Path) -> None:
    done = _quick([sys.executable, faults.__file__, fault], tmp_path, *THINKING, most=2 * MINUTE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^first module +.+$", done.stdout, re.MULTILINE), done.stdout
    (finding,) = json.loads((tmp_path / "result.json").read_text())["findings"]
    assert finding["error"] is None


@pytest.mark.parametrize("fault", sorted(SNAPSHOT_FAULTS))
def test_fault_of_a_model_with_states(fault: str, tmp_path: Path, random_model: Callable[..., Path]) -> None:
    config = DESCRIBED["qwen3_5_text"]()
    config.vocab_size = 4096
    model = ["--target", str(random_model(config))]
    done = _quick([sys.executable, faults.__file__, fault], tmp_path, *model, most=2 * MINUTE)
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = json.loads((tmp_path / "result.json").read_text())["findings"]
    assert finding["error"] is None
