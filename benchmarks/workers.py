"""Measures `detgen run` on workers with a thread each, against one process with as many threads, with equal bytes.

    python benchmarks/workers.py                   # 2 workers, 5 runs of each
    python benchmarks/workers.py --runs 3 --repeat 10 --options "--target demo-thinking"

The prompts are those of sample_prompts/code.jsonl, repeated with seeds of their own, sampled at temperature 0.8.

    generating   seconds of generating, without start-up: median and all runs
    whole        seconds of the whole command
    ratio        of the medians of generating: how many times as fast the workers are; it should be at least 1.0
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROMPTS = Path(__file__).parents[1] / "sample_prompts" / "code.jsonl"


def write_prompts(path: Path, repeat: int) -> None:
    """Write the sample prompts `repeat` times, each time with another seed."""
    lines = [json.loads(line) for line in _PROMPTS.read_text().splitlines()]
    with path.open("w") as file:
        for seed in range(repeat):
            for i, line in enumerate(lines):
                file.write(json.dumps({**line, "id": f"{seed}-{i}", "seed": seed, "temperature": 0.8}) + "\n")


def run(prompts: Path, out: Path, options: list[str]) -> tuple[float, float, bytes]:
    """Run once; return the seconds of generating, the seconds in all, and the output."""
    command = [sys.executable, "-m", "detgen", "run", str(prompts), "-o", str(out), "-q", "--overwrite", *options]
    began = time.monotonic()
    subprocess.run(command, check=True)
    whole = time.monotonic() - began
    manifest = json.loads((out / "manifest.json").read_text())
    return manifest["seconds"], whole, (out / "outputs.jsonl").read_bytes()


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--options", default="", help="further options of all runs")
    asked = parser.parse_args()
    number, further = asked.workers, shlex.split(asked.options)
    sides = {f"--threads {number}": [f"--threads={number}"], f"--workers {number}": [f"--workers={number}"]}
    generating: dict[str, list[float]] = {side: [] for side in sides}
    whole: dict[str, list[float]] = {side: [] for side in sides}
    outputs: set[bytes] = set()
    print(f"load before: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, asked.repeat)
        for turn in range(asked.runs):
            for side in sorted(sides, reverse=turn % 2 == 1):
                seconds, all_of_it, output = run(prompts, Path(folder) / "out", [*sides[side], *further])
                generating[side].append(seconds)
                whole[side].append(all_of_it)
                outputs.add(output)
    assert len(outputs) == 1, "the outputs differ"
    for side in sides:
        for what, taken in (("generating", generating[side]), ("whole", whole[side])):
            each = " ".join(f"{seconds:.1f}" for seconds in taken)
            print(f"{side:<12} {what:<10} {statistics.median(taken):6.2f} s   ({each})")
    one, other = (statistics.median(generating[side]) for side in sides)
    print(f"ratio {one / other:.2f}, equal bytes in {2 * asked.runs} runs; load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
