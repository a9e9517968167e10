"""Measures a coordinator: requests and bytes per second of a whole run on workers whose engines cost nothing.

    python benchmarks/coordinator.py                       # 200,000 requests, 2 workers
    python benchmarks/coordinator.py --requests 20000 --tokens 512
    python benchmarks/coordinator.py --workers 0 --tokens 16    # without workers: the model in the process of the run

Everything but the engines is detgen's own: the input is read, requests go to workers over Ray, and their completions,
made beforehand, come back and go through store, writer and acceptance log to the disk. Workers and coordinator share
this machine, so the rate includes all of them; the coordinator's own limit is its processor time.

    requests/s   of a run's generating part, by the clock
    bytes/s      of outputs.jsonl and acceptance.jsonl together, by the clock
    a CPU second requests, bytes and tokens that the coordinator's process handles in a second of processor time
    memory       of the coordinator at several points of the run, and its peak; it must not grow with the requests
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from detgen.engine.config import EngineConfig
from detgen.engine.request import Chunk, Completion, Request, TokenRecord
from detgen.engine.stats import DraftCounts, DrafterStats, EngineStats
from detgen.params import SamplingParams
from detgen.progress import Progress
from detgen.run import RunConfig, run
from detgen.workers.cluster import RayCluster
from detgen.workers.team import WorkersEngine
from detgen.workers.worker_config import WorkersConfig

_POINTS = 8  # points at which memory is measured


class FreeEngine:
    """An engine that has every completion at once; they differ only in their requests."""

    thinks = dated = False

    def __init__(self, config: EngineConfig) -> None:
        self.stats = EngineStats()
        self._batch_size = config.batch_size
        self._parts: dict[int, dict[str, Any]] = {}

    def stream(self, requests: Iterable[Request | None]) -> Iterator[list[Completion]]:
        """Complete a batch at a time."""
        source = iter(requests)
        while True:
            done: list[Completion] = []
            while len(done) < self._batch_size and (request := next(source, None)) is not None:
                done.append(Completion(request, **self._completed(request.params.max_tokens)))
                self.stats.tokens += request.params.max_tokens
            yield done

    def _completed(self, count: int) -> dict[str, Any]:
        """Return what completions with that many tokens have in common."""
        if count not in self._parts:
            records = tuple(
                TokenRecord(p, p // 4, 1000 + p, "ngram", 1000 + p, "accepted", -0.1234567 * p, 2.3456789)
                for p in range(count)
            )
            drafts = DraftCounts(ngram=DrafterStats(rounds=count // 4, drafted=count, accepted=count))
            self._parts[count] = {
                "text": "word" * count,
                "token_ids": tuple(range(1000, 1000 + count)),
                "finish_reason": "length",
                "prompt_tokens": 100,
                "records": records,
                "drafts": drafts,
            }
        return self._parts[count]

    def score_stream(self, requests: Iterable[Any]) -> Iterator[list[Any]]:
        """Not supported: nothing is scored here."""
        raise NotImplementedError

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """Return none."""
        return []

    def profile(self) -> dict[str, Any]:
        """Return the profile of no model."""
        return {"target": {"name": "none", "digest": "", "quant": "none"}, "dtype": "float32", "arithmetic": "none"}

    def draft_profile(self) -> dict[str, Any] | None:
        """Return None: there is no draft model."""
        return None


class EndingEngine(FreeEngine):
    """The same in the process of the run, where requests come to an end."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[list[Completion]]:
        """Complete a batch at a time, until the requests end."""
        return takewhile(bool, super().stream(requests))


class Meter:
    """An observer that measures the memory of this process during a run.

    Attributes:
        memory: pairs of prompts done and resident MiB.
        started: processor seconds of this process when the run began to generate.
    """

    def __init__(self, total: int) -> None:
        self.memory: list[tuple[int, float]] = []
        self.started = 0.0
        self._step = total / _POINTS
        self._process = psutil.Process()

    def message(self, text: str) -> None:
        """Show it."""
        print(text)

    def stage(self, text: str) -> None:
        """Show it."""
        print(f"{text} ...", flush=True)

    def progress(self, progress: Progress) -> None:
        """Measure the memory at some points."""
        if not self.memory:
            self.started = time.process_time()
        if progress.done >= len(self.memory) * self._step:
            self.memory.append((progress.done, self._process.memory_info().rss / 2**20))


def measure(requests: int, tokens: int, workers: int, batch_size: int, folder: Path) -> Meter:
    """Run that many requests and print the rates and the memory."""
    prompts, out = folder / "prompts.jsonl", folder / "out"
    with prompts.open("w") as file:
        for i in range(requests):
            file.write(json.dumps({"id": i, "prompt": f"Question {i}: " + "word " * 80}) + "\n")
    meter, engine = Meter(requests), EngineConfig(batch_size=batch_size, device="cpu")
    config = RunConfig(str(prompts), out, SamplingParams(max_tokens=tokens), engine)
    if workers:
        with closing(RayCluster(WorkersConfig(workers), engine, meter, FreeEngine)) as cluster:
            summary = run(config, meter, build_engine=lambda _: WorkersEngine(cluster, batch_size, meter))
            busy = time.process_time() - meter.started
    else:
        summary = run(config, meter, build_engine=EndingEngine)
        busy = time.process_time() - meter.started
    assert summary.written.prompts == requests
    assert summary.written.tokens == requests * tokens
    written = sum(os.path.getsize(out / name) for name in ("outputs.jsonl", "acceptance.jsonl"))
    for what, seconds in (("second", summary.seconds), ("CPU second", busy)):
        rates = f"{requests / seconds:,.0f} requests, {written / seconds / 1e6:,.1f} MB"
        print(f"a {what:<10}  {rates}, {requests * tokens / seconds:,.0f} tokens ({seconds:,.1f} s in all)")
    print("memory        " + ", ".join(f"{memory:,.0f} MiB at {done:,}" for done, memory in meter.memory))
    print(f"at most       {summary.peak_memory / 2**20:,.0f} MiB")
    return meter


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--workers", type=int, default=2, help="0 has the engine in the process of the run")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options.requests, options.tokens, options.workers, options.batch_size, Path(folder))


if __name__ == "__main__":
    main()
