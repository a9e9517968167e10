"""Real runs with the embedded models, killed at any time of their lives: the same command goes on to the same bytes.

No sample that was committed is lost, or generated again: it would be in the store twice then.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.fakes import keys_in

pytestmark = pytest.mark.slow

PROMPTS = 24
CHAIN = 5  # kills of one run before it may end


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        options: of the command.
        command: run or score.
        same_log: whether the drafter's log is the same in every run.
        cached: whether it has a cache, which is empty when the run begins.
        startup: seconds that it takes to begin, or a little more.
    """

    options: tuple[str, ...] = ()
    command: str = "run"
    same_log: bool = True
    cached: bool = False
    startup: float = 1

    def files(self) -> list[str]:
        """The files that are the same in every run."""
        names = ["outputs.jsonl"]
        if self.command == "run" and self.same_log:
            names.append("acceptance.jsonl")
        return names + ["results.jsonl"] * ("--output-format=openai" in self.options)


NONE, WARM = "--drafter=none", ("--temperature=0.8", "--seed=3")
KINDS = {
    "greedy, no drafts": Kind((NONE,)),
    "with a cache": Kind((NONE, *WARM), cached=True),
    "scores": Kind(command="score"),
    "greedy, all drafters": Kind(same_log=False),
    "OpenAI": Kind((NONE, *WARM, "--output-format=openai", "--logprobs=1")),
    "hot, all drafters": Kind(("--temperature=1.2", "--top-p=0.9", "--top-k=50", "--seed=9"), same_log=False),
    "two workers": Kind((NONE, *WARM, "--workers=2", "--kv-memory=64MiB"), startup=12),
    "two workers, with a cache": Kind((NONE, "--workers=2", "--kv-memory=64MiB"), cached=True, startup=12),
}


def _prompts(path: Path) -> None:
    """Write the prompts, some with several samples, one that cannot run."""
    starts = ("def add(a, b):\n", "import os\n\n", "class Tree:\n", "for i in range(", "# Sort a list\n", "x = [")
    lines = [{"prompt": f"{starts[n % 6]}{n}", "n": 1 + n % 3, "id": n} for n in range(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt": 1}\n')


def _texts(path: Path) -> None:
    """Write what is scored."""
    lines = [{"prompt": f"def f{n}(", "completions": [f"a, {word})" for word in ("b", "c", "d")]} for n in range(200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt": 1}\n')


def _command(kind: Kind, folder: Path, out: Path) -> list[str]:
    name = "texts.jsonl" if kind.command == "score" else "prompts.jsonl"
    usual = ("--batch-size=4", *(("--max-tokens=40",) if kind.command == "run" else ()))
    cache = (f"--cache={out}-cache",) if kind.cached else ()
    command = [sys.executable, "-m", "detgen", kind.command, str(folder / name), "-o", str(out)]
    return [*command, *usual, *kind.options, *cache]


def _finish(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def _lines(out: Path) -> int:
    """Lines of the output file; -1 without one."""
    try:
        return (out / "outputs.jsonl").read_bytes().count(b"\n")
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
        draw: draws the moments.
    """

    def __init__(self, draw: random.Random) -> None:
        self.where: Counter[str] = Counter()
        self._draw = draw

    def kill(self, kind: Kind, command: list[str], out: Path, lines: int) -> bool:
        """Start a run of so many lines and kill it at a moment; False if it had ended before."""
        moment = self._draw.choices(("early", "generating", "finishing"), (3, 5, 2))[0]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            self._wait(moment, kind, process, out, lines)
            process.kill()
            _, said = process.communicate()
        assert "Traceback" not in said, said
        if process.returncode != -9:
            assert process.returncode == 0, said
            return False
        self.where[self._place(moment, out, lines)] += 1
        return True

    def _wait(self, moment: str, kind: Kind, process: subprocess.Popen[str], out: Path, lines: int) -> None:
        if moment == "early":
            time.sleep(self._draw.uniform(0, kind.startup))
            return
        aim = lines if moment == "finishing" else self._draw.randint(min(max(_lines(out), 0), lines), lines)
        while process.poll() is None and _lines(out) < aim and not _finished(out):
            time.sleep(0.001)
        time.sleep(self._draw.uniform(0, 0.2 if moment == "finishing" else 0.02))

    def _place(self, moment: str, out: Path, lines: int) -> str:
        if moment == "early":
            return "while_starting"
        if _finished(out):
            return "after_the_manifest"
        return "while_finishing" if _lines(out) >= lines else "while_generating"


def test_a_run_that_is_killed_at_any_time_goes_on_to_the_same_bytes(
    tmp_path: Path, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    _prompts(tmp_path / "prompts.jsonl")
    _texts(tmp_path / "texts.jsonl")
    draw = random.Random(17)
    killer = Killer(draw)
    wanted, kills, runs, kept_of_all = tries(200), 0, 0, 0
    whole: dict[str, Path] = {}
    while kills < wanted:
        name = list(KINDS)[runs % len(KINDS)]
        kind = KINDS[name]
        if name not in whole:
            whole[name] = tmp_path / f"whole{len(whole)}"
            _finish(_command(kind, tmp_path, whole[name]))
        out = tmp_path / f"out{runs}"
        command = _command(kind, tmp_path, out)
        kept: set[bytes] = set()
        for _ in range(min(CHAIN, wanted - kills)):
            if not killer.kill(kind, command, out, _lines(whole[name])):
                break
            kills += 1
            now = keys_in(out)
            assert kept <= now, f"{name}: run {runs} lost samples"
            kept = now
            if _finished(out):
                break
        there = _finished(out)
        said = _finish(command)
        if not there:
            resumed = re.search(r"resumed\W+([\d,]+)", said)
            assert (int(resumed[1].replace(",", "")) if resumed else 0) == len(kept), f"{name}: run {runs}: {said}"
        kept_of_all += len(kept)
        for file in kind.files():
            assert (out / file).read_bytes() == (whole[name] / file).read_bytes(), f"{name}: {file} of run {runs}"
        assert keys_in(out) == keys_in(whole[name]), f"{name}: samples of run {runs}"
        if kind.cached:
            assert len(keys_in(Path(f"{out}-cache"))) == len(keys_in(Path(f"{whole[name]}-cache")))
        left = [sorted(path.name for path in folder.iterdir()) for folder in (out, whole[name])]
        assert left[0] == left[1]
        runs += 1
    tally(kills=kills, runs=runs, **killer.where, samples_kept=kept_of_all, differing=0, tracebacks=0)
