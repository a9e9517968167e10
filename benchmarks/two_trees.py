"""Two checkouts of detgen against each other: the same generations in turns, each checkout in a process of its own.

    .venv/bin/python benchmarks/two_trees.py ../before

The other checkout must have an environment of its own (`make demo` there). A ratio above 1 says that this one is
faster; a quarter of the rounds lie below and above the range. Texts are compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).resolve().parent.parent
JOBS = (("none", 1, 3, 48), ("auto", 1, 4, 64), ("none", 16, 16, 48), ("ngram", 16, 16, 64), ("auto", 16, 16, 64))


def serve() -> None:
    """Generate what standard input asks for: drafter, batch size, prompts, tokens; answer seconds and token ids."""
    from detgen import Engine, Request, SamplingParams

    base = Engine(drafter="auto", batch_size=16, prefix_cache=False)
    lines = (HERE / "sample_prompts" / "code.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    for asked in map(json.loads, sys.stdin):
        drafter, batch_size, count, tokens = asked
        engine = base.with_settings(drafter=drafter, batch_size=batch_size)
        params = SamplingParams(max_tokens=tokens)
        requests = [Request(i, i, prompt=p, params=params) for i, p in enumerate(prompts[:count])]
        started = time.perf_counter()
        done = engine.generate(requests)
        print(json.dumps((time.perf_counter() - started, [c.token_ids for c in done])), flush=True)


class Tree:
    """A checkout, served by its own interpreter."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [folder / ".venv" / "bin" / "python", __file__, "--serve"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: tuple[str, int, int, int]) -> tuple[float, list[list[int]]]:
        """Seconds, and the token ids of each prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        seconds, tokens = json.loads(self._process.stdout.readline())
        return seconds, tokens


def main() -> None:
    """Print a line per job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.other is None:
        parser.error("name the other checkout")
    trees = {"other": Tree(args.other.resolve()), "this": Tree(HERE)}
    speeds: dict[tuple[tuple[str, int, int, int], str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for job in JOBS:
            found = {}
            for name in sorted(trees, reverse=turn % 2 == 1):
                seconds, found[name] = trees[name].run(job)
                if turn:  # the first round warms up
                    speeds.setdefault((job, name), []).append(sum(map(len, found[name])) / seconds)
            if found["other"] != found["this"]:
                sys.exit(f"{job}: the two generate other tokens")
    for job in JOBS:
        other, this = speeds[job, "other"], speeds[job, "this"]
        ratios = [a / b for a, b in zip(this, other, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        print(
            f"{job[0]:>5}, batch {job[1]:>2}: {median(other):6,.0f} and {median(this):6,.0f} tokens per second, "
            f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
        )


if __name__ == "__main__":
    main()
