"""Peak memory of `detgen run` by the number of prompts: it should not grow with them.

    python benchmarks/memory.py                            # 2,000 and 20,000 prompts
    python benchmarks/memory.py --prompts 2000 200000      # the second run takes long

The embedded model, one token a prompt, with and without the prefix cache. Prompts are ids, 8 of them, in every 32nd one
72, which is more than a page of the KV cache. No two begin alike, so that the prefix cache has something new to hold of
each. The peak is that of the resident memory of the run's largest process, as the system counted it (`VmHWM`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS, LONG, EVERY = 8, 72, 32
VOCABULARY = 4096


def write_prompts(path: Path, count: int) -> None:
    """A file of prompts that begin with their own numbers."""
    draw = random.Random(0)
    rest = [draw.randrange(1, VOCABULARY) for _ in range(LONG - 3)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            own = [1 + number // 1_000_000 % 1000, 1 + number // 1000 % 1000, 1 + number % 1000]
            print(json.dumps({"prompt_token_ids": (own + rest)[: TOKENS if number % EVERY else LONG]}), file=file)


def run(prompts: Path, output: Path, prefix_cache: str) -> tuple[float, float]:
    """Peak MiB and seconds of a run."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "detgen", "run", prompts, "--output", output, "--overwrite", "--max-tokens", "1"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "--prefix-cache", prefix_cache], stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            sys.exit(f"{said.read()}the run on {prompts.name} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss / 1024, time.perf_counter() - started


def main() -> None:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2_000, 20_000])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for count in args.prompts:
            prompts = Path(scratch) / f"{count}.jsonl"
            write_prompts(prompts, count)
            for setting in ("off", "on"):
                peak, seconds = run(prompts, Path(scratch) / "out", setting)
                print(f"{count:>9,} prompts, prefix cache {setting:>3}: {peak:,.0f} MiB, {seconds:,.0f} s", flush=True)


if __name__ == "__main__":
    main()
