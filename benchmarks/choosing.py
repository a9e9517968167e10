"""What choosing tokens costs: milliseconds of CPU time a row, by vocabulary, parameters and shape of the logits.

    .venv/bin/python benchmarks/choosing.py [--other ../before]

Logits are peaked (normal, with a few peaks, as large models give them), flat (as random weights give them), or those of
the embedded model, repeated with a little noise. Then what a round chooses and judges where all requests are greedy.
With `--other`, each figure is followed by that of another checkout. Both take turns, each in a process of its own with
one thread; an environment in that checkout is used if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).resolve().parent.parent
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


def serve() -> None:
    """Time what standard input asks for: a file of logits, parameters (None: a greedy round), repetitions."""
    import torch

    from detgen.kernels.sampling import Choice, choose

    torch.set_num_threads(1)
    for file, parameters, times in map(json.loads, sys.stdin):
        logits = torch.from_numpy(np.load(file))
        if parameters is None:
            work = _greedy_round(logits)
        else:
            choices = [Choice(seed=7, position=i, **parameters) for i in range(len(logits))]

            def work(logits: torch.Tensor = logits, choices: list[Choice] = choices) -> object:
                return choose(logits, choices)

        spent = []
        for _ in range(times + 1):
            started = time.process_time()
            work()
            spent.append(time.process_time() - started)
        print(1e3 * median(spent[1:]) / (1 if parameters is None else len(logits)), flush=True)


def _greedy_round(logits) -> Callable[[], object]:  # type: ignore[no-untyped-def]
    """Choosing and judging rows that are all greedy, by the interface that the checkout has."""
    from detgen.kernels.sampling import Choice, choose

    try:
        from detgen.kernels.logprobs import judge_rows
    except ImportError:  # before choices could be left out
        from detgen.engine.decoding import judge_rows  # type: ignore[attr-defined, no-redef]

        choices, rows = [Choice()] * len(logits), list(range(len(logits)))
        own = logits.clone()  # is overwritten; what is in it does not matter for the time
        return lambda: judge_rows(own, choose(own, choices), rows)
    return lambda: judge_rows(logits, choose(logits, None))


class Tree:
    """A checkout, served by an interpreter of its own."""

    def __init__(self, folder: Path) -> None:
        python = folder / ".venv" / "bin" / "python"
        self._process = subprocess.Popen(
            [python if python.exists() else sys.executable, __file__, "--serve"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, file: Path, parameters: dict[str, float] | None, times: int) -> float:
        """Milliseconds of a row, or of a greedy round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps((str(file), parameters, times)), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def peaked(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Logits like those of a large model."""
    logits = 2.5 * draw.standard_normal((rows, vocabulary))
    for row in logits:
        row[draw.integers(0, vocabulary, 8)] += [14, 12, 11, 10, 9, 8, 8, 7]
    return logits


def flat(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Logits like those of random weights."""
    return 0.05 * draw.standard_normal((rows, vocabulary))


def embedded(draw: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Logits of the embedded model, repeated with noise up to the vocabulary."""
    from detgen import Engine, Request, SamplingParams
    from detgen.program.arrays import array

    class Seen:
        """Keeps the logits."""

        chains = False

        def __init__(self) -> None:
            self.logits: list[np.ndarray] = []

        def committed(self, seq: object, first: int, logits: np.ndarray) -> None:
            """Of committed tokens."""
            self.logits.append(array(logits).copy())

        def finished(self, seq: object, keys: np.ndarray, values: np.ndarray) -> None:
            """Nothing to keep."""

    seen = Seen()
    prompt = "def read_lines(path):\n"
    for _ in Engine(drafter="none", batch_size=1).stream(
        [Request(0, 0, prompt=prompt, params=SamplingParams(max_tokens=rows, ignore_eos=True))], seen
    ):
        pass
    own = np.concatenate(seen.logits)[:rows]
    wide = np.tile(own, (1, -(-vocabulary // own.shape[1])))[:, :vocabulary]
    return wide + 0.3 * draw.standard_normal(wide.shape)


def main() -> None:
    """Print a table for each shape of the logits, and one for greedy rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    trees = [Tree(HERE)] + ([Tree(args.other.resolve())] if args.other else [])

    def measured(file: Path, parameters: dict[str, float] | None, times: int) -> str:
        found: list[list[float]] = [[] for _ in trees]
        for turn in range(args.rounds):
            for i in sorted(range(len(trees)), reverse=turn % 2 == 1):
                found[i].append(trees[i].ask(file, parameters, times))
        return " / ".join(f"{median(times):.3f}" for times in found)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.npy"
        draw = np.random.default_rng(0)
        for make in (peaked, flat, embedded):
            print(f"\nCPU time in ms a row, {make.__name__} logits" + (", this / other" if args.other else ""))
            print("".join(f"{head:>22}" for head in ("", *(f"{v:,}" for v in VOCABULARIES))))
            columns = []
            for vocabulary in VOCABULARIES:
                np.save(file, make(draw, ROWS, vocabulary).astype(np.float32))
                columns.append([measured(file, parameters, 5) for parameters in PARAMETERS.values()])
            for name, *cells in zip(PARAMETERS, *columns, strict=True):
                print("".join(f"{cell:>22}" for cell in (name, *cells)))
        print("\nCPU time in ms to choose and judge the rows of a greedy round, vocabulary 4,096")
        for live in LIVE:
            np.save(file, peaked(draw, live, 4096).astype(np.float32))
            print(f"{live:>22}{measured(file, None, 20):>22}")


if __name__ == "__main__":
    main()
