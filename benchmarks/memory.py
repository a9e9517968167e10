"""Peak memory of `detgen run` by the number of prompts: it should not grow with them.

    python benchmarks/memory.py                            # 2,000 and 20,000 prompts
    python benchmarks/memory.py --prompts 2000 200000      # the second run takes long
    python benchmarks/memory.py --prompts 2000 200000 --no-model    # minutes: an engine of no cost generates

The embedded model, one token a prompt, with and without the prefix cache; or, of all that a run does beside its model,
the reading, the store and the writing, with and without a cache, 16 tokens a prompt. Prompts are ids, 8 of them, in
every 32nd one 72, which is more than a page of the KV cache. No two begin alike, so that the prefix cache has something
new to hold of each. The peak is that of the resident memory of the run's largest process, as the system counted it
(`VmHWM`).
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
from collections.abc import Iterable, Iterator
from itertools import takewhile
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


def run_without_model(prompts: Path, output: Path, cache: Path | None) -> tuple[float, float]:
    """Peak MiB and seconds of a run whose engine has every completion at once."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--serve", prompts, output, *([cache] if cache else [])]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the run on {prompts.name} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss / 1024, time.perf_counter() - started


def serve(prompts: Path, output: Path, cache: Path | None = None) -> None:
    """Run without a model in this process."""
    from coordinator import FreeEngine

    from detgen.engine.config import EngineConfig
    from detgen.engine.request import Completion, Request, SamplingParams
    from detgen.run import RunConfig, run

    class EndingEngine(FreeEngine):
        """Ends with its requests."""

        def stream(self, requests: Iterable[Request | None]) -> Iterator[list[Completion]]:
            return takewhile(bool, super().stream(requests))

    class Silent:
        """Hears nothing."""

        def message(self, text: str) -> None: ...
        def stage(self, text: str) -> None: ...
        def progress(self, progress: object) -> None: ...

    asked = RunConfig(str(prompts), output, SamplingParams(max_tokens=16), EngineConfig(), overwrite=True, cache=cache)
    run(asked, Silent(), build_engine=EndingEngine)


def main() -> None:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--serve", type=Path, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for count in args.prompts:
            prompts = Path(scratch) / f"{count}.jsonl"
            write_prompts(prompts, count)
            for setting in ("off", "on"):
                if args.no_model:
                    cache = Path(scratch) / "cache" if setting == "on" else None
                    peak, seconds = run_without_model(prompts, Path(scratch) / "out", cache)
                else:
                    peak, seconds = run(prompts, Path(scratch) / "out", setting)
                what = "cache" if args.no_model else "prefix cache"
                print(f"{count:>9,} prompts, {what} {setting:>3}: {peak:,.0f} MiB, {seconds:,.0f} s", flush=True)


if __name__ == "__main__":
    main()
