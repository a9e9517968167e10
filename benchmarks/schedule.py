"""detgen's scheduler on files of mixed lengths, beside one that knows them and beside the equal slots of before pages.

    python benchmarks/schedule.py                 # all cases, 3 seeds
    python benchmarks/schedule.py cpu --seeds 1   # the cases whose name has "cpu" in it

No model runs. The scheduler and the loop are detgen's own, with a table in the model's place, by which each request
ends after as many tokens as its length says; prompts are of random tokens, so that no two begin alike. 1,500 requests
have log-normal prompts (median 200, sigma 1.0, up to 6,000 tokens) and outputs (median 200, sigma 0.9), `max_tokens`
is 1,024 or 4,096; or all of that is scaled to the embedded model's context of 1,024. Where the batch is 16 at full
lengths, there are 500. A pass has at most 512 rows.

A line per case and seed:

    least     rounds that no schedule can do without
    ideal     rounds of one that knows all lengths and packs by them (`policies.ideal`)
    in pages  the same, where positions are given out in pages of 64
    slots     rounds of equal slots (`policies.equal_slots`), and how many times the ideal's they are; with more passes
    detgen    rounds, and how many times the ideal's: at most 1.05 is what we want
    passes    of detgen
    live      sequences that hold memory at a time, on average, of the ideal and of detgen
    preempted sequences that gave their memory back, and prompt and output tokens that were read again for them, per
              cent of all
    seconds   that detgen took, its host alone
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from lengths import Lengths, draw_lengths
from policies import Outcome, equal_slots, ideal, least_rounds
from table_engine import Loop

from detgen import Request, SamplingParams
from detgen.engine.scheduler import Scheduler
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import MOST_ROWS, Windows
from detgen.kernels.pass_cost import PassCost
from detgen.runner.kv_cache import KVCache

BAR = 1.05
_END = 0  # the first of two tokens
_LOGITS = np.array([0, 1], dtype=np.float32)  # of a row that goes on


class Case(NamedTuple):
    """A file and a machine.

    Attributes:
        name: of the case.
        batch: most sequences at a time.
        positions: of the KV cache.
        most: `max_tokens` of the requests.
        scale: factor of the lengths.
        long: share of the prompts that have 8,000 to 24,000 tokens.
        requests: in the file.
        context: of the model.
        barred: whether the bar is for it; the others show what happens in a cache that is far too small.
    """

    name: str
    batch: int
    positions: int
    most: int
    scale: float = 1.0
    long: float = 0.0
    requests: int = 1_500
    context: int = 131_072
    barred: bool = True


CASES = (
    Case("gpu", 256, 384_000, 1_024),
    Case("gpu", 256, 384_000, 4_096),
    Case("gpu 2% long", 256, 384_000, 1_024, long=0.02),
    Case("gpu 2% long", 256, 384_000, 4_096, long=0.02),
    Case("cpu", 16, 24_576, 1_024, requests=500),
    Case("cpu", 16, 24_576, 4_096, requests=500),
    Case("cpu demo", 16, 16_384, 102, 0.1, context=1_024),
    Case("cpu demo", 16, 16_384, 410, 0.1, context=1_024),
    Case("cpu demo", 16, 4_096, 410, 0.1, context=1_024),
    Case("gpu tight", 256, 96_000, 4_096, barred=False),
    Case("cpu tight", 16, 12_288, 4_096, requests=500, barred=False),
    Case("cpu tight", 16, 1_536, 410, 0.1, context=1_024, barred=False),
)


class Simulated(NamedTuple):
    """What detgen took.

    Attributes:
        outcome: as of the others.
        preemptions: sequences that gave their memory back.
        again: rows that were read again, per row that must be read.
        seconds: of the host.
    """

    outcome: Outcome
    preemptions: int
    again: float
    seconds: float


class Table:
    """In the place of the target's passes: logits by which each sequence ends when its request's length says.

    It runs no chains.

    Args:
        requests: by index.
        scheduler: says which sequence has which slot.
    """

    chaining = None

    def __init__(self, requests: list[Lengths], cache: KVCache, scheduler: Scheduler) -> None:
        self.cache = cache
        self.cost = PassCost()
        self.passes = self.rows = 0
        self._requests = requests
        self._scheduler = scheduler

    def run(self, windows: Windows, broken: list[int], *, scored: bool) -> torch.Tensor:
        """Like `ModelRunner.run`."""
        self.passes += 1
        self.rows += len(windows.tokens)
        asked = windows.logits > 0
        positions = (windows.starts + windows.lengths)[asked]
        ends = np.array([self._end(slot) for slot in windows.slots[asked].tolist()])
        return torch.from_numpy(np.where((positions == ends)[:, None], _LOGITS[::-1], _LOGITS))

    def _end(self, slot: int) -> int:
        """Positions that are filled when the sequence ends."""
        return self._requests[self._scheduler.live[slot].request.index].positions


def simulate(case: Case, requests: list[Lengths], seed: int) -> Simulated:
    """Run the requests through detgen's scheduler."""
    ids = random.Random(seed)
    tables: list[Table] = []

    def table(cache: KVCache, scheduler: Scheduler) -> Table:
        tables.append(Table(requests, cache, scheduler))
        return tables[0]

    loop = Loop(table, case.batch, case.positions, _NoTexts())
    asked = (
        Request(
            index,
            index,
            token_ids=tuple(ids.getrandbits(30) for _ in range(each.prompt)),
            params=SamplingParams(max_tokens=each.most),
        )
        for index, each in enumerate(requests)
    )
    started = time.perf_counter()
    rounds = held = ended = 0
    for done in loop.run(asked, _END):
        rounds += 1
        held += loop.stats.live
        ended += len(done)
        for seq in done:
            wanted = requests[seq.request.index].output
            assert seq.generated == wanted, f"{seq.generated} tokens where the length is {wanted}"
    assert ended == len(requests)
    must = sum(r.positions for r in requests)
    return Simulated(
        Outcome(rounds, tables[0].passes, held / rounds),
        loop.scheduler.preemptions,
        tables[0].rows / must - 1,
        time.perf_counter() - started,
    )


class _NoTexts:
    """A tokenizer for those who do not look at texts."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def main() -> None:
    """Print a line per case and seed, and the worst ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", help="part of the names of the cases to run")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    worst = 0.0
    torch.set_num_threads(1)  # a round has hardly any work for them
    print(
        f"{'case':<12}{'most':>6}{'pool':>8}{'batch':>6}{'seed':>5} |{'least':>6}{'ideal':>6}{'in pages':>9} |"
        f"{'slots':>6}{'ratio':>6} (passes) |{'detgen':>7}{'ratio':>7} {'passes':>6} | {'live':>11} | preempted |"
        " seconds"
    )
    for case in (c for c in CASES if args.only in c.name):
        for seed in range(args.seeds):
            requests = draw_lengths(case.requests, case.most, seed, scale=case.scale, long=case.long)
            size = case.batch, case.positions, MOST_ROWS
            best, paged = ideal(requests, *size), ideal(requests, *size, page=BLOCK)
            slots = equal_slots(requests, *size, case.context)
            got = simulate(case, requests, seed)
            ratio = got.outcome.rounds / best.rounds
            worst = max(worst, ratio if case.barred else 0.0)
            print(
                f"{case.name:<12}{case.most:>6}{case.positions:>8}{case.batch:>6}{seed:>5} |"
                f"{least_rounds(requests, case.batch, MOST_ROWS):>6}{best.rounds:>6}{paged.rounds:>9} |"
                f"{slots.rounds:>6}{slots.rounds / best.rounds:>6.2f} ({slots.passes:>6}) |"
                f"{got.outcome.rounds:>7}{ratio:>7.3f}{'' if case.barred else '*'} {got.outcome.passes:>6} |"
                f" {best.live:>5.1f} {got.outcome.live:>5.1f} | {got.preemptions:>3} {got.again:>5.1%} |"
                f" {got.seconds:>4.1f}",
                flush=True,
            )
    print(f"worst ratio to the ideal {worst:.3f}, wanted at most {BAR}; * is not counted")


if __name__ == "__main__":
    main()
