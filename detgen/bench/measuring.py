"""The runs of a benchmark, and the judgement of their outputs.

Contenders take turns, round after round, so that disturbances affect all alike. The first round of a cell warms up and
is not measured, but its outputs count. A contender that fails is left out from then on.

Outputs should be equal between batch sizes, and equal to the canonical ones. A verified row that differs from `none`,
or from itself at another batch size, is marked as wrong, however fast it is. So is any row most of whose first tokens
differ from the canonical ones, or all of them if it computes in fewer bits. A float32 peer that picks another token at
a near-tie later on is not wrong; the number of its equal prompts is shown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from detgen.bench.bench_results import Row
from detgen.bench.cells import Cell, is_verified
from detgen.bench.peer_interface import Contender, Outcome
from detgen.bench.processes import Processes
from detgen.bench.processor_time import Others, OthersClock
from detgen.progress import Observer, Progress
from detgen.worker import WorkerError

Tokens = list[list[int]]
Outputs = defaultdict[tuple[str, str], dict[int, Tokens]]
"""Generated tokens of each prompt, by workload and label, then by batch size; empty for what never ran."""

REFERENCE = "detgen none"
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 7


def judge(rows: list[Row], outputs: Outputs) -> None:
    """Compare the rows' outputs with those of others, and record what is wrong with them."""
    for row in rows:
        own = outputs[row.workload, row.label]
        if row.error is not None or row.batch_size not in own:
            continue
        tokens = own[row.batch_size]
        share = row.fraction or 1.0
        # The most different batch size is the likeliest to run other kernels.
        others = [size for size in own if size != row.batch_size]
        other = max(others, key=lambda size: max(size, row.batch_size) / min(size, row.batch_size), default=None)
        if other is not None:
            row.same_bytes = (*_equal(tokens, own[other], share), other)
        canonical = _reference(outputs, row, REFERENCE)
        if canonical is not None:
            row.agreement = _equal(tokens, canonical, share)
        # Weights in fewer bits give other texts, on which all drafters must agree.
        expected = canonical if row.reference == REFERENCE else _reference(outputs, row, row.reference)
        row.wrong = row.wrong or _wrong(row, tokens, expected)


def _reference(outputs: Outputs, row: Row, label: str) -> Tokens | None:
    """Return the outputs of the row with this label, at the same batch size as another row if possible."""
    found = outputs[row.workload, label]
    return found.get(row.batch_size) or next(iter(found.values()), None)


def _equal(a: Tokens, b: Tokens, share: float) -> tuple[int, int]:
    """Return how many verified prompts of both have the same tokens, and how many there are."""
    pairs = [(x, y) for i, (x, y) in enumerate(zip(a, b, strict=False)) if is_verified(i, share)]
    return sum(x == y for x, y in pairs), len(pairs)


def _wrong(row: Row, tokens: Tokens, expected: Tokens | None) -> str | None:
    if row.fraction:
        same, of = (0, 0) if expected is None else _equal(tokens, expected, row.fraction)
        if same < of:
            return f"{of - same} of {of} verified prompts differ from drafter none"
        if row.same_bytes is not None and row.same_bytes[0] < row.same_bytes[1]:
            return f"verified prompts differ between batch sizes {row.batch_size} and {row.same_bytes[2]}"
    if expected is None:
        return None
    firsts = [a[0] == b[0] for a, b in zip(tokens, expected, strict=False)]
    if sum(firsts) < (1 if row.fewer_bits else len(firsts) / 2):
        return f"only {sum(firsts)} of {len(firsts)} first tokens are right"
    return None


class Measuring:
    """Measures cells.

    Args:
        cells: cells to measure.
        processes: run the jobs.
        observer: is told before each run, and at the end.
        rounds: number of measured rounds per cell; None takes as many as time allows, within bounds.
        seconds: time for all cells together.
        keep: receives the rows so far, and everything that contenders generated, after each measured round.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        processes: Processes,
        observer: Observer,
        rounds: int | None,
        seconds: float,
        keep: Callable[[list[Row], Outputs], None] = lambda *_: None,
    ) -> None:
        self._outputs: Outputs = defaultdict(dict)
        self._cells = cells
        self._processes = processes
        self._observer = observer
        self._rounds = rounds
        self._keep = keep
        self._rows: list[Row] = []  # of finished cells
        self._started = time.monotonic()
        self._until = self._started + seconds
        self._done = 0
        self._total = sum(len(cell.contenders) for cell in cells) * (1 + (rounds or _LEAST_ROUNDS))

    def run(self) -> tuple[list[Row], Outputs]:
        """Measure all cells; return a row for each contender of each cell, and everything that contenders generated.

        A contender that ran at one batch size only runs once at another, so that its tokens can be compared.
        """
        for at, cell in enumerate(self._cells):
            seconds = max(self._until - time.monotonic(), 0.0)
            self._rows += self._measure(cell, seconds / (len(self._cells) - at))
        for cell in self._cells:
            for contender in cell.contenders:
                self._compare_batches(cell, contender)
        self._tell()
        return self._rows, self._outputs

    def _measure(self, cell: Cell, seconds: float) -> list[Row]:
        """Measure a cell, in about `seconds` if the number of rounds is free."""
        rows = {contender: _row(cell, contender) for contender in cell.contenders}
        started = time.monotonic()
        self._round(cell, rows, measured=False)  # loads the models
        began = time.monotonic()
        self._round(cell, rows, measured=True)
        now = time.monotonic()
        rounds = self._rounds
        if rounds is None:
            more = (seconds - (now - started)) / max(now - began, 1e-3)
            rounds = int(min(max(1 + more, _LEAST_ROUNDS), _MOST_ROUNDS))
            self._total += (rounds - _LEAST_ROUNDS) * len(rows)
        for _ in range(rounds - 1):
            self._round(cell, rows, measured=True)
        return list(rows.values())

    def _round(self, cell: Cell, rows: dict[Contender, Row], *, measured: bool) -> None:
        """Run each contender that has not failed once."""
        for contender, row in rows.items():
            self._tell(f"{row.workload}, batch {row.batch_size}: {row.label}")
            if row.error is not None:
                continue
            job = cell.job(contender)
            others = OthersClock()
            try:
                outcome = self._processes.run(contender, job)
            except WorkerError as error:
                row.error = str(error)
                for values in (row.seconds, row.cpu_seconds, row.others, row.ttft, row.tpot):
                    values.clear()
                continue
            before = self._outputs[row.workload, row.label].setdefault(row.batch_size, outcome.tokens)
            pairs = zip(job.deterministic, before, outcome.tokens, strict=True)
            if contender.fraction and any(verified and a != b for verified, a, b in pairs):
                row.wrong = "two rounds gave different tokens"
            if measured:
                _take(row, outcome, cell, others.read())
        if measured:
            _ratios(list(rows.values()))
            self._keep([*self._rows, *rows.values()], self._outputs)

    def _compare_batches(self, cell: Cell, contender: Contender) -> None:
        """Run a contender at a second batch size if no cell has; after a failure, nothing is compared."""
        outputs = self._outputs[cell.workload.name, contender.label]
        if not contender.self_checked or len(outputs) != 1:
            return
        other = max(cell.batch_size // 2, 1) if cell.batch_size > 1 else 2
        self._total += 1
        self._tell(f"{cell.workload.name}, batch {other} for comparison: {contender.label}")
        try:
            outputs[other] = self._processes.run(contender, cell.job(contender, other)).tokens
        except WorkerError:
            return

    def _tell(self, *what: str) -> None:
        """Report that a run begins; the time left is estimated from earlier runs."""
        seconds = time.monotonic() - self._started
        left = seconds / self._done * (self._total - self._done) if self._done else None
        self._observer.progress(Progress(self._done, self._total, "runs", seconds, left, what))
        self._done += 1


def _row(cell: Cell, contender: Contender) -> Row:
    prompts = cell.workload.prompts
    return Row(
        workload=cell.workload.name,
        batch_size=cell.batch_size,
        peer=contender.peer,
        label=contender.label,
        precision=contender.precision,
        weights=contender.weights,
        fewer_bits=contender.fewer_bits,
        reference=contender.reference,
        synthetic=contender.acceptance is not None,
        fraction=contender.fraction,
        requests=len(prompts),
        prompt_tokens=sum(len(p.tokens) for p in prompts),
        output_tokens=sum(p.output for p in prompts),
    )


def _take(row: Row, outcome: Outcome, cell: Cell, others: Others | None) -> None:
    """Add a measured run to its row, with what other processes did meanwhile."""
    row.seconds.append(outcome.seconds)
    if outcome.cpu_seconds is not None:
        row.cpu_seconds.append(outcome.cpu_seconds)
    if others is not None:
        row.others.append((others.seconds, others.there_were))
    timed = [
        (first, last, prompt.output)
        for first, last, prompt in zip(outcome.first, outcome.last, cell.workload.prompts, strict=True)
        if first is not None and last is not None
    ]
    row.ttft.append(_p50_p99([first for first, _, _ in timed]))
    row.tpot.append(_p50_p99([(last - first) / (n - 1) for first, last, n in timed if n > 1]))
    row.passes, row.counts = outcome.passes, outcome.counts
    row.precision, row.weights = outcome.precision or row.precision, outcome.weights or row.weights
    row.fewer_bits = row.fewer_bits if outcome.fewer_bits is None else outcome.fewer_bits
    row.memory = max(row.memory or 0, outcome.memory or 0) or None
    row.gpu_memory = max(row.gpu_memory or 0, outcome.gpu_memory or 0) or None


def _p50_p99(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return median(values), quantiles(values, n=100, method="inclusive")[98]


def _ratios(rows: list[Row]) -> None:
    """Compute the speeds of each round relative to the baselines of the same round."""
    good = [r for r in rows if r.error is None]
    plain = [r.speeds for r in good if r.label == REFERENCE]
    others = [r.speeds for r in good if r.peer.startswith("transformers")]
    for row in good:
        if plain:
            row.over_none = [own / base for own, base in zip(row.speeds, plain[0], strict=True)]
        if others:
            best = [max(speeds) for speeds in zip(*others, strict=True)]
            row.over_transformers = [own / base for own, base in zip(row.speeds, best, strict=True)]
