"""What a round costs the host: CPU time of everything but the model, at 32 and at 256 live requests.

    python benchmarks/host.py

A table of logits, float32 [rows, 4096], stands in for the model; scheduler, loop, packing, choosing, verification, the
records of tokens and the texts of what ended are detgen's own. Nothing is drafted, tokens are chosen greedily. CPU time
is that of all threads of the process, with torch limited to one; what it takes to write the logits anew, as a model
does, is left out. Two kinds of rounds:

    decoding   all requests decode behind 128 prompt tokens; none begins or ends
    with ends  128 tokens in, 64 to 192 out: in every round some requests end, and others take their place and are read

Milliseconds a round, median and mean: of the engine, of choosing tokens and judging them (`choose`, `judge_rows`), and
of both. Wanted is a median below 0.3 ms at 32 requests and below 1.0 ms at 256.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from table_engine import Loop
from transformers import AutoTokenizer

from detgen import Request, SamplingParams
from detgen.engine import output_processing
from detgen.errors import DEMO
from detgen.kernels.input_batch import InputBatch
from detgen.runner.model_runner import ModelRunner

WANTED = {32: 0.3, 256: 1.0}
VOCABULARY = 4096
PROMPT = 128
WARM, ROUNDS = 300, 400


class Clock:
    """CPU time of parts of a round, in nanoseconds."""

    def __init__(self) -> None:
        self.model = self.choosing = 0

    @contextmanager
    def choosing_timed(self) -> Iterator[None]:
        """Meanwhile the loop's time for choosing and judging is counted."""
        before = output_processing.choose, output_processing.judge_rows
        output_processing.choose, output_processing.judge_rows = map(self._timed, before)
        try:
            yield
        finally:
            output_processing.choose, output_processing.judge_rows = before

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.process_time_ns()
            found = function(*args, **named)
            self.choosing += time.process_time_ns() - started
            return found

        return timed


class Table:
    """In a decoder's place: logits that were drawn before."""

    chaining = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        generator = torch.Generator().manual_seed(0)
        self._drawn = [torch.randn(512, VOCABULARY, generator=generator) for _ in range(4)]
        self._fresh = torch.empty(512, VOCABULARY)
        self._calls = 0

    def run(self, batch: InputBatch, *_: object, **scored: bool) -> torch.Tensor:
        """Logits of the wanted rows, which may be overwritten."""
        started = time.process_time_ns()
        self._calls += 1
        logits = self._fresh[: batch.count]
        logits.copy_(self._drawn[self._calls % len(self._drawn)][: batch.count])
        self._clock.model += time.process_time_ns() - started
        return logits


class Round(NamedTuple):
    """Milliseconds of a round."""

    engine: float
    choosing: float

    @property
    def both(self) -> float:
        """Their sum."""
        return self.engine + self.choosing


def measure(live: int, outputs: range, tokenizer: Any) -> list[Round]:
    """Rounds with `live` requests, after others that warm up."""
    draw = random.Random(0)
    clock = Clock()
    table = Table(clock)
    count = live * (1 + (WARM + ROUNDS) // outputs.start)
    requests = [
        Request(
            index,
            index,
            token_ids=tuple(draw.choices(range(VOCABULARY), k=PROMPT)),
            params=SamplingParams(max_tokens=draw.choice(outputs)),
        )
        for index in range(count)
    ]
    loop = Loop(lambda cache, _: ModelRunner(table, cache, 4), live, live * 2 * (PROMPT + outputs.stop), tokenizer)
    steps = loop.run(requests)
    found = []
    with clock.choosing_timed():
        for _ in islice(steps, WARM):
            pass
        for _ in range(ROUNDS):
            clock.model = clock.choosing = 0
            started = time.process_time_ns()
            next(steps)
            spent = time.process_time_ns() - started - clock.model
            found.append(Round((spent - clock.choosing) / 1e6, clock.choosing / 1e6))
    return found


def main() -> None:
    """Print two lines per number of live requests."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    print(f"{'live':>4} {'rounds':<10}{'engine':>16}{'choosing':>16}{'sum':>16}  (median, mean) ms of CPU time a round")
    for live, wanted in WANTED.items():
        for name, outputs in (("decoding", range(1000, 1001)), ("with ends", range(64, 193))):
            found = measure(live, outputs, tokenizer)
            parts = zip(*((r.engine, r.choosing, r.both) for r in found), strict=True)
            shown = "".join(f"{median(part):>8.3f}{fmean(part):>8.3f}" for part in parts)
            print(f"{live:>4} {name:<10}{shown}  wanted below {wanted}", flush=True)


if __name__ == "__main__":
    main()
