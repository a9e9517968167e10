"""Real runs with the embedded models, killed at any time of their lives: the same command goes on to the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fakes import NAMES

pytestmark = pytest.mark.slow

PROMPTS = 24
OPTIONS = ("--max-tokens=40", "--batch-size=4", "--quiet")
# Name, options, and whether the drafter's log is the same in every run.
SAMPLINGS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("greedy, no drafts", ("--drafter=none",), True),
    ("warm, two samples, no drafts", ("--drafter=none", "--temperature=0.8", "--seed=3"), True),
    ("greedy, all drafters", (), False),
    ("hot, two samples, all drafters", ("--temperature=1.2", "--top-p=0.9", "--top-k=50", "--seed=9"), False),
)
CHAIN = 5  # kills of one run before it may end


def _prompts(path: Path) -> int:
    """Write the prompts, some with several samples, one that cannot run; return how many samples they have."""
    starts = ("def add(a, b):\n", "import os\n\n", "class Tree:\n", "for i in range(", "# Sort a list\n", "x = [")
    lines = [{"prompt": f"{starts[n % 6]}{n}", "n": 1 + n % 3, "id": n} for n in range(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt": 1}\n')
    return sum(1 + n % 3 for n in range(PROMPTS))


def _command(prompts: Path, out: Path, options: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "detgen", "run", str(prompts), "-o", str(out), *OPTIONS, *options]


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def _samples(out: Path) -> int:
    """Samples in the journal; -1 without one."""
    try:
        return (out / "journal.jsonl").read_bytes().count(b'{"crc32"')
    except FileNotFoundError:
        return -1


def _finished(out: Path) -> bool:
    try:
        return bool(json.loads((out / "manifest.json").read_bytes())["status"] == "finished")
    except FileNotFoundError:
        return False


class Killer:
    """Kills runs at moments that are drawn.

    Args:
        samples: of a whole run.
        draw: draws the moments.
    """

    def __init__(self, samples: int, draw: random.Random) -> None:
        self.where: Counter[str] = Counter()
        self._samples, self._draw = samples, draw

    def kill(self, command: list[str], out: Path) -> bool:
        """Start a run and kill it at a moment; False if it had ended before."""
        moment = self._draw.choices(("early", "generating", "finishing"), (3, 4, 3))[0]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            self._wait(moment, process, out)
            process.kill()
            _, said = process.communicate()
        assert "Traceback" not in said, said
        if process.returncode != -9:
            assert process.returncode == 0, said
            return False
        self.where[self._place(moment, out)] += 1
        return True

    def _wait(self, moment: str, process: subprocess.Popen[str], out: Path) -> None:
        if moment == "early":
            time.sleep(self._draw.uniform(0, 1))
            return
        before = max(_samples(out), 0)
        aim = self._samples if moment == "finishing" else self._draw.randint(before, self._samples)
        while process.poll() is None and _samples(out) < aim and not _finished(out):
            time.sleep(0.001)
        time.sleep(self._draw.uniform(0, 0.2 if moment == "finishing" else 0.02))

    def _place(self, moment: str, out: Path) -> str:
        if moment == "early":
            return "in_the_first_second"
        if _finished(out):
            return "after_the_manifest"
        return "while_finishing" if _samples(out) >= self._samples else "while_generating"


def test_a_run_that_is_killed_at_any_time_goes_on_to_the_same_bytes(
    tmp_path: Path, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    samples = _prompts(prompts)
    draw = random.Random(17)
    killer = Killer(samples, draw)
    wanted, kills, runs = tries(200), 0, 0
    whole: dict[str, Path] = {}
    while kills < wanted:
        name, options, same_log = SAMPLINGS[runs % len(SAMPLINGS)]
        if name not in whole:
            whole[name] = tmp_path / f"whole{len(whole)}"
            _finish(_command(prompts, whole[name], options))
        out = tmp_path / f"out{runs}"
        command = _command(prompts, out, options)
        for _ in range(min(CHAIN, wanted - kills)):
            if not killer.kill(command, out):
                break
            kills += 1
        _finish(command)
        runs += 1
        for file in ("outputs.jsonl", *["acceptance.jsonl"] * same_log):
            assert (out / file).read_bytes() == (whole[name] / file).read_bytes(), f"{name}: {file} of run {runs}"
        assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)
    tally(kills=kills, runs=runs, **killer.where, differing=0, tracebacks=0)
