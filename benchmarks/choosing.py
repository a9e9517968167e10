"""Measures the cost of choosing tokens: CPU time per row, by vocabulary, parameters and shape of the logits.

    .venv/bin/python benchmarks/choosing.py

Logits are peaked (normal, with a few peaks, as from large models), flat (as from random weights), or those of the
embedded model, repeated with a little noise. A last table has the cost of choosing and judging in a round of greedy
requests. Everything runs in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from families import Trace

from detgen import Engine, Request, SamplingParams
from detgen.kernels.logprobs import judge_rows
from detgen.kernels.sampling import Choice, choose

VOCABULARIES = (4096, 32_000, 128_256, 151_936)
ROWS = 4
PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "T=0.8": {"temperature": 0.8},
    "T=1.3": {"temperature": 1.3},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p=0.95, T=1.3": {"temperature": 1.3, "top_p": 0.95},
    "top_k=50": {"temperature": 0.8, "top_k": 50},
    "min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k=50, top_p=0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "all three": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
}
LIVE = (32, 256)  # greedy requests in a round
TIMES = 25


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Return the processor time of a call in milliseconds: the median of `times` calls after one that warms up."""
    spent = []
    for _ in range(times + 1):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return 1e3 * median(spent[1:])


def peaked(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Return logits like those of a large model."""
    logits = 2.5 * draw.standard_normal((rows, vocabulary))
    for row in logits:
        row[draw.integers(0, vocabulary, 8)] += [14, 12, 11, 10, 9, 8, 8, 7]
    return logits


def flat(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Return logits like those of random weights."""
    return 0.05 * draw.standard_normal((rows, vocabulary))


def embedded(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Return logits of the embedded model, repeated with noise up to the vocabulary."""

    trace, params = Trace(), SamplingParams(max_tokens=rows, ignore_eos=True)
    request = Request(0, 0, prompt="def read_lines(path):\n", params=params)
    list(Engine(drafter="none", batch_size=1).stream([request], trace))
    own = np.concatenate(trace.logits[0])[:rows]
    wide = np.tile(own, (1, -(-vocabulary // own.shape[1])))[:, :vocabulary]
    return wide + 0.3 * draw.standard_normal(wide.shape)


def main() -> None:
    """Print a table for each shape of the logits, and one for greedy rounds."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    for make in (peaked, flat, embedded):
        print(f"\nCPU time in ms a row, {make.__name__} logits")
        print("".join(f"{head:>22}" for head in ("", *(f"{v:,}" for v in VOCABULARIES))))
        drawn = [torch.from_numpy(make(draw, ROWS, v).astype(np.float32)) for v in VOCABULARIES]
        for name, parameters in PARAMETERS.items():
            choices = [Choice(seed=7, position=i, **parameters) for i in range(ROWS)]
            taken = [milliseconds(partial(choose, logits, choices), TIMES) / ROWS for logits in drawn]
            print(f"{name:>22}" + "".join(f"{ms:>22.3f}" for ms in taken))
    print("\nCPU time in ms to choose and judge the rows of a greedy round, vocabulary 4,096")
    for live in LIVE:
        logits = torch.from_numpy(peaked(draw, live, 4096).astype(np.float32))
        print(f"{live:>22}{milliseconds(lambda logits=logits: judge_rows(logits, choose(logits, None)), TIMES):>22.3f}")


if __name__ == "__main__":
    main()
