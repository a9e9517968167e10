"""How long a thinking model takes to read prompts, by how far it reads ahead, in turns.

    .venv/bin/python benchmarks/reading_ahead.py

Stories of coins (`tools/thinking_tasks.py`), one token generated for each, no prefixes shared:

- few: sentences beside the point, at least 50 chunks, at most 5 % of which think; one at a time. Wanted is at most a
  third of the time that reading chunk by chunk takes;
- many: flips alone, where most thoughts are; one at a time, and in full batches. Wanted is at most 1.05.

Ratios are medians over rounds of the time divided by that of `--speculative-prefill off`; a quarter of the rounds lie
below and above the range.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from detgen import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from thinking_tasks import NAMES, coin_flips

SETTINGS: tuple[str | int, ...] = ("off", "auto", 1, 3, 1_000_000)
MERGED = NAMES[:24]  # of one token each: the shortest way from a flip to the next


def stories(few: bool, count: int, draw: random.Random) -> list[str]:
    """Prompts with few or many thoughts."""
    if few:
        return [coin_flips(draw, draw.randint(3, 5), besides=1.0, most_besides=24).text for _ in range(count)]
    return [coin_flips(draw, draw.randint(20, 40), MERGED).text for _ in range(count)]


def measure(engines: dict[str | int, Engine], few: bool, count: int, rounds: int) -> dict[str | int, list[float]]:
    """Seconds of each setting in each round; every round has other stories."""
    seconds: dict[str | int, list[float]] = {setting: [] for setting in engines}
    for number in range(rounds + 1):
        prompts = stories(few, count, random.Random(number))
        answers: set[Any] = set()
        order = list(engines)
        random.Random(number).shuffle(order)
        for setting in order:
            started = time.perf_counter()
            done = engines[setting].generate(prompts, max_tokens=1)
            if number:  # the first round includes one-time work
                seconds[setting].append(time.perf_counter() - started)
            answers.add(tuple((c.token_ids, c.thoughts) for c in done))
        assert len(answers) == 1, "outputs differ"
    return seconds


def show(title: str, engines: dict[str | int, Engine], seconds: dict[str | int, list[float]]) -> None:
    """Print a line for each setting."""
    print(title)
    for setting, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds["off"], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        s = engines[setting].stats
        print(
            f"  {setting!s:>8}  {median(taken):7.3f} s  {median(ratios):5.2f} [{low:.2f}, {high:.2f}]  "
            f"{s.prefill_rounds:,} prefill rounds, {s.rows:,} rows, {s.thoughts:,} thoughts of {s.chunks:,} chunks"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of reading, by how far it reads ahead.")
    parser.add_argument("--target", default="demo-thinking")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args(arguments)
    whole = Engine(args.target, drafter="none", prefix_cache=False)
    for few, batch, count in ((True, 1, 4), (False, 1, 4), (True, 16, 32), (False, 16, 32), (False, 64, 64)):
        engines = {s: whole.with_settings(speculative_prefill=s, batch_size=batch) for s in SETTINGS}
        seconds = measure(engines, few, count, args.rounds)
        show(f"{'few' if few else 'many'} thoughts, batch size {batch}, {count} stories", engines, seconds)


if __name__ == "__main__":
    main()
