"""Rounds of drafting and verifying that one call runs on a device: their passes, and what these cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from detgen.kernels.input_batch import MOST_ROWS, InputBatch, Window, Windows, fill_passes
from detgen.kernels.rounds import Pass, Passes, Round, Rounds
from detgen.runner.model_runner import ModelRunner


def run_rounds(target: ModelRunner, drafting: ModelRunner, asked: Rounds) -> list[Round]:
    """Run rounds in one call; each sequence continues from what would be committed.

    Args:
        target: runs the passes that verify; its `rounding` is not None.
        drafting: runs the passes that draft, in the same pages or over the same cache; any if there are none.
        asked: the rounds. The pages of each slot must reach to its `room`.
    """
    rounding = target.rounding
    assert rounding is not None, "asked before"
    started, passes = time.perf_counter(), _passes(target, drafting, asked)
    found = rounding.rounds(drafting.decoder.rounding, asked, passes)
    runs = (drafting, passes.drafting), (target, passes.verifying)
    ran = [(runner, one) for runner, turns in runs for ones in turns for one in ones]
    times = np.array([_seconds(runner, target, one.batch) for runner, one in ran])
    times *= (time.perf_counter() - started) / times.sum()
    for (runner, one), seconds in zip(ran, times.tolist(), strict=True):
        runner.passes += 1
        runner.rows += len(one.batch.ids)
        runner.cost.update(len(one.batch.ids), seconds, float(one.batch.area))
    return found


def _seconds(runner: ModelRunner, target: ModelRunner, batch: InputBatch) -> float:
    """Return the predicted time of a runner's pass, by the target's cost if its own is unknown, else in rows."""
    rows, area = len(batch.ids), float(batch.area)
    return runner.cost.predict(rows, area, 0) or target.cost.predict(rows, area, 0) or float(rows)


def _passes(target: ModelRunner, drafting: ModelRunner, asked: Rounds) -> Passes:
    """Pack the passes of rounds."""
    own, drafted = asked.windows, asked.limits.drafted

    def windows(which: np.ndarray, before: int, rows: np.ndarray, logits: np.ndarray) -> Windows:
        tokens = np.zeros(int(rows.sum()), np.int64)
        return Windows(own.slots[which], own.starts[which] - before, rows, logits, tokens, logits - 1)

    which, first, steps, none = drafted.nonzero()[0], list[Pass](), list[Pass](), np.zeros(0, np.int64)
    if asked.texts is None:
        first = [Pass(drafting.pack(asked.reads), which, none, 1, 0)]
        for step in range(int(drafted.max())):
            there = which[drafted[which] > step]
            ones = np.ones(len(there), np.int64)
            again = 1 if step else asked.again
            batch = drafting.pack(windows(there, again - 1, again * ones, ones))
            steps.append(Pass(batch, there, none, 2 - again + step, step))
    every, indexes = np.arange(len(drafted)), {slot: i for i, slot in enumerate(own.slots.tolist())}
    placed = windows(every, 0, 1 + drafted, 1 + drafted)

    def verifying(chunks: Sequence[Window]) -> Iterator[Pass]:
        which = every
        for part in fill_passes(placed, chunks, MOST_ROWS):
            some, which = which[: len(part)], which[len(part) :]
            others = part.part(len(some), len(part))
            of = [indexes[slot] for slot in np.repeat(others.slots, others.logits).tolist()]
            yield Pass(target.pack(part), some, np.array(of, np.int64), 1, -1)

    alike = list(verifying(()))
    chunks = [*asked.chunks, *[()] * (asked.turns - len(asked.chunks))]
    later = [steps] * (asked.turns - 1)
    return Passes([first + steps[1:], *later], [list(verifying(of)) if of else alike for of in chunks])
