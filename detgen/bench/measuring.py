"""The runs of a cell: its settings take turns, round after round, so that whatever the machine does hits all alike.

The first round warms up and is not measured, but its outputs count. A setting that fails is out of the game; the
others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Protocol

from detgen.bench.cells import Cell
from detgen.bench.interface import BenchConfig, Job, Observer, Outcome, Setting, Variant
from detgen.bench.peers.detgen_engine import FAST
from detgen.bench.processes import PeerError
from detgen.bench.rows import Row

Tokens = list[list[int]]
LEAST_ROUNDS, MOST_ROUNDS = 3, 7
_QUICK_SECONDS = 140.0  # in which the quick grid is measured, loading aside


class Runner(Protocol):
    """Runs jobs, each peer in its process."""

    def run(self, peer: str, variant: Variant, job: Job) -> Outcome:
        """Run a job.

        Raises:
            PeerError: it failed.
        """
        ...


class Outputs:
    """What every setting generated, by workload and batch size, to be compared at the end."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], dict[int, Tokens]] = {}

    def keep(self, workload: str, label: str, batch_size: int, tokens: Tokens) -> Tokens:
        """Keep the tokens of the first run of a kind; later ones get those of the first."""
        return self._kept.setdefault((workload, label), {}).setdefault(batch_size, tokens)

    def of(self, workload: str, label: str) -> dict[int, Tokens]:
        """By batch size."""
        return self._kept.get((workload, label), {})


class Progress:
    """Counts runs and tells how long the rest will take, from how long those so far took.

    Args:
        observer: who is told.
        total: runs in all, as far as is known.
    """

    def __init__(self, observer: Observer, total: int) -> None:
        self._observer = observer
        self._done, self._total = 0, total
        self._started = time.monotonic()

    def expect(self, more: int) -> None:
        """The total has changed by so many runs."""
        self._total += more

    def extra(self, what: str) -> None:
        """A run begins that was not expected."""
        self._total += 1
        self.next(what)

    def next(self, what: str) -> None:
        """A run begins."""
        seconds = time.monotonic() - self._started
        left = seconds / self._done * (self._total - self._done) if self._done else None
        self._observer.progress(self._done, self._total, what, left)
        self._done += 1


def runs_of(cell: Cell) -> int:
    """How many runs a cell takes at least: the first round, the measured ones, and those for the comparison."""
    return len(cell.settings) * (1 + LEAST_ROUNDS)


def measure_cell(
    cell: Cell, runner: Runner, config: BenchConfig, outputs: Outputs, progress: Progress, seconds: float
) -> list[Row]:
    """Measure the settings of a cell.

    Args:
        cell: what is measured.
        runner: runs the jobs.
        config: how many rounds.
        outputs: where generated tokens are kept.
        progress: told before each run.
        seconds: that the cell should take, where the number of rounds is free.

    Returns:
        A row a setting, in order.
    """
    rows = {setting: _row(cell, setting) for setting in cell.settings}
    turn = _Turns(cell, runner, outputs, progress, rows)
    started = time.monotonic()
    turn.round(measured=False)  # models are loaded in it
    began = time.monotonic()
    turn.round(measured=True)
    now = time.monotonic()
    more = _whole((seconds - (now - started)) / max(now - began, 1e-3))
    rounds = config.rounds or min(max(1 + more, LEAST_ROUNDS), MOST_ROUNDS)
    progress.expect((rounds - LEAST_ROUNDS) * len(cell.settings))
    for _ in range(rounds - 1):
        turn.round(measured=True)
    _ratios(list(rows.values()))
    return list(rows.values())


def cell_seconds(config: BenchConfig, cells: Sequence[Cell], at: int, started: float) -> float:
    """How long the cell at this place may take: an equal share of what is left of the quick grid's time.

    The full grid takes its rounds whatever they take.
    """
    if config.full:
        return float("inf")
    return max(_QUICK_SECONDS - (time.monotonic() - started), 0.0) / (len(cells) - at)


def _whole(number: float) -> int:
    return MOST_ROUNDS if number > MOST_ROUNDS else int(number)


class _Turns:
    """The settings of a cell and how they fare."""

    def __init__(
        self, cell: Cell, runner: Runner, outputs: Outputs, progress: Progress, rows: dict[Setting, Row]
    ) -> None:
        self._cell, self._runner, self._outputs, self._progress = cell, runner, outputs, progress
        self._rows = rows

    def round(self, *, measured: bool) -> None:
        """One run of each setting that has not failed."""
        for setting, row in self._rows.items():
            self._progress.next(f"{self._cell.workload.name}, batch {self._cell.batch_size}: {setting.label}")
            if row.error is not None:
                continue
            job = self._cell.job(setting)
            try:
                outcome = self._runner.run(setting.peer, setting.variant, job)
            except PeerError as error:
                _fail(row, str(error))
                continue
            before = self._outputs.keep(row.workload, row.label, row.batch_size, outcome.tokens)
            pairs = zip(job.deterministic, before, outcome.tokens, strict=True)
            if setting.fraction and any(verified and a != b for verified, a, b in pairs):
                row.wrong = "two rounds gave different tokens"
            if measured:
                _take(row, outcome, self._cell)


def _row(cell: Cell, setting: Setting) -> Row:
    prompts = cell.workload.prompts
    return Row(
        workload=cell.workload.name,
        batch_size=cell.batch_size,
        peer=setting.peer,
        label=setting.label,
        precision=setting.variant.precision,
        synthetic=setting.acceptance is not None,
        fraction=setting.fraction,
        requests=len(prompts),
        prompt_tokens=sum(len(p.tokens) for p in prompts),
        output_tokens=sum(p.output for p in prompts),
    )


def _fail(row: Row, error: str) -> None:
    """Keep nothing of a row but its error."""
    row.error = error
    for values in (row.seconds, row.ttft, row.tpot):
        values.clear()


def _take(row: Row, outcome: Outcome, cell: Cell) -> None:
    """Add one measured run to its row."""
    row.seconds.append(outcome.seconds)
    timed = [
        (first, last, prompt.output)
        for first, last, prompt in zip(outcome.first, outcome.last, cell.workload.prompts, strict=True)
        if first is not None and last is not None
    ]
    row.ttft.append(_p50_p99([first for first, _, _ in timed]))
    row.tpot.append(_p50_p99([(last - first) / (n - 1) for first, last, n in timed if n > 1]))
    row.passes, row.counts = outcome.passes, outcome.counts
    row.precision = outcome.precision or row.precision
    row.memory = max(row.memory or 0, outcome.memory or 0) or None
    row.gpu_memory = max(row.gpu_memory or 0, outcome.gpu_memory or 0) or None


def _p50_p99(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return median(values), quantiles(values, n=100, method="inclusive")[98]


def _ratios(rows: list[Row]) -> None:
    """Compare the speeds of each round with the baselines' of the same round."""
    good = [r for r in rows if r.error is None]
    fast = [r.speeds for r in good if r.peer == "detgen" and r.label == f"detgen {FAST}"]
    others = [r.speeds for r in good if r.peer.startswith("transformers")]
    for row in good:
        if fast:
            row.over_fast = [own / base for own, base in zip(row.speeds, fast[0], strict=True)]
        if others:
            best = [max(speeds) for speeds in zip(*others, strict=True)]
            row.over_transformers = [own / base for own, base in zip(row.speeds, best, strict=True)]


def compare_batches(
    cell: Cell, setting: Setting, runner: Runner, outputs: Outputs, before_run: Callable[[str], None]
) -> None:
    """Run a setting at a second batch size, once, if no cell has; its tokens are kept for the comparison.

    A failure leaves the comparison out.
    """
    if not setting.variant.self_checked or len(outputs.of(cell.workload.name, setting.label)) != 1:
        return
    other = max(cell.batch_size // 2, 1) if cell.batch_size > 1 else 2
    before_run(f"{cell.workload.name}, batch {other} for comparison: {setting.label}")
    try:
        outcome = runner.run(setting.peer, setting.variant, cell.job(setting, other))
    except PeerError:
        return
    outputs.keep(cell.workload.name, setting.label, other, outcome.tokens)
