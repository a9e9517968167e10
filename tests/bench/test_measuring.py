from __future__ import annotations

from collections.abc import Callable

import pytest

from detgen.bench.cells import Cell
from detgen.bench.interface import BenchConfig, Job, Outcome, Prompt, Setting, Variant, Workload
from detgen.bench.judging import judge
from detgen.bench.measuring import Outputs, Progress, compare_batches, measure_cell, runs_of
from detgen.bench.processes import PeerError


class Told:
    """An observer that keeps the progress that it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, str, float | None]] = []

    def message(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, what: str, seconds_left: float | None) -> None:
        self.steps.append((done, total, what, seconds_left))


PROMPTS = tuple(Prompt((i + 1,), 3) for i in range(4))


def setting(peer: str, variant: str, fraction: float | None = None) -> Setting:
    return Setting(peer, Variant(variant, "float32", peer, self_checked=True), fraction)


FAST, NONE = setting("detgen", "fast path", 0.0), setting("detgen", "none", 1.0)
GENERATE = setting("transformers", "generate")


class Fake:
    """Runs jobs in no time: each variant takes its seconds and gives its tokens."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[str] = []
        self.tokens: Callable[[str, Job], list[list[int]]] = lambda variant, job: [[7] * 3 for _ in job.prompts]

    def run(self, peer: str, variant: Variant, job: Job) -> Outcome:
        self.calls.append(variant.name)
        name = variant.name.replace(" ", "_")
        if name not in self.seconds:
            raise PeerError("out of memory")
        taken = self.seconds[name] * (1 + 0.1 * len(self.calls))
        n = len(job.prompts)
        return Outcome(self.tokens(name, job), taken, [0.1] * n, [0.3] * n, 10, {"drafted": 4}, memory=100)


def cell(*settings: Setting) -> Cell:
    return Cell(Workload("sample", PROMPTS, ""), 4, settings)


def measure(fake: Fake, *settings: Setting, rounds: int | None = 3, told: Told | None = None) -> tuple[list, Outputs]:
    place, outputs = cell(*settings), Outputs()
    progress = Progress(told or Told(), runs_of(place))
    return measure_cell(place, fake, BenchConfig(rounds=rounds), outputs, progress, 100.0), outputs


def test_settings_take_turns_and_the_first_round_is_not_measured() -> None:
    fake = Fake(fast_path=1.0, none=2.0, generate=4.0)
    rows, _ = measure(fake, FAST, NONE, GENERATE)
    assert fake.calls == ["fast path", "none", "generate"] * 4
    assert [len(r.seconds) for r in rows] == [3, 3, 3]
    assert rows[1].ttft[0] == pytest.approx((0.1, 0.1))
    assert rows[1].tpot[0] == pytest.approx((0.1, 0.1)), "two tokens behind the first in 0.2 seconds"
    assert (rows[1].output_tokens, rows[1].passes, rows[1].memory) == (12, 10, 100)


def test_ratios_are_of_the_same_round() -> None:
    rows, _ = measure(Fake(fast_path=1.0, none=2.0, generate=4.0), FAST, NONE, GENERATE)
    fast, none, generate = rows
    assert none.over_fast == pytest.approx([f / n for n, f in zip(none.seconds, fast.seconds, strict=True)])
    assert none.over_transformers == pytest.approx([g / n for n, g in zip(none.seconds, generate.seconds, strict=True)])
    assert fast.over_fast == [1.0] * 3


def test_a_setting_that_fails_is_a_row_with_its_error_and_the_others_go_on() -> None:
    fake = Fake(fast_path=1.0, generate=1.0)
    rows, _ = measure(fake, FAST, NONE, GENERATE)
    assert rows[1].error == "out of memory"
    assert rows[1].seconds == []
    assert fake.calls.count("none") == 1, "it is not tried again"
    assert len(rows[2].seconds) == 3


def test_rounds_fill_the_time_within_bounds() -> None:
    rows, _ = measure(Fake(none=1.0), NONE, rounds=None)
    assert len(rows[0].seconds) == 7
    place = cell(NONE)
    rows = measure_cell(place, Fake(none=1.0), BenchConfig(), Outputs(), Progress(Told(), 4), 0.0)
    assert len(rows[0].seconds) == 3


def test_progress_counts_every_run_to_the_end() -> None:
    told = Told()
    measure(Fake(fast_path=1.0, none=1.0), FAST, NONE, rounds=5, told=told)
    assert [done for done, *_ in told.steps] == list(range(12))
    assert told.steps[-1][1] == 12
    assert told.steps[0][3] is None
    assert told.steps[-1][3] is not None
    assert told.steps[0][2] == "sample, batch 4: detgen fast path"


def test_a_verified_row_whose_rounds_differ_is_wrong() -> None:
    fake = Fake(none=1.0)
    fake.tokens = lambda variant, job: [[len(fake.calls)] * 3 for _ in job.prompts]
    rows, _ = measure(fake, NONE)
    assert rows[0].wrong == "two rounds gave different tokens"


@pytest.mark.parametrize(("differs", "wrong"), [(0, True), (1, False)])
def test_of_a_partly_verified_row_the_verified_requests_must_not_differ(differs: int, wrong: bool) -> None:
    fake = Fake(none=1.0)
    fake.tokens = lambda variant, job: [[len(fake.calls) if i == differs else 7] * 3 for i in range(len(job.prompts))]
    ((row,), _) = measure(fake, setting("detgen", "none", 0.5))
    assert row.wrong == ("two rounds gave different tokens" if wrong else None)


def test_a_second_batch_size_is_run_where_no_cell_has_one() -> None:
    fake = Fake(none=1.0, generate=1.0)
    fake.tokens = lambda variant, job: [[job.batch_size if variant == "generate" else 7] * 3 for _ in job.prompts]
    rows, outputs = measure(fake, NONE, GENERATE)
    for s in (NONE, GENERATE):
        compare_batches(cell(NONE, GENERATE), s, fake, outputs, lambda what: None)
        compare_batches(cell(NONE, GENERATE), s, fake, outputs, lambda what: pytest.fail("it has been run"))
    judge(rows, outputs)
    assert [r.same_bytes for r in rows] == [(4, 4, 2), (0, 4, 2)]
    assert [r.wrong for r in rows] == [None, "only 0 of 4 first tokens are right"]
    assert rows[1].agreement == (0, 4)


def test_a_failure_of_the_comparison_leaves_it_out() -> None:
    rows, outputs = measure(Fake(none=1.0), NONE)
    compare_batches(cell(NONE), NONE, Fake(), outputs, lambda what: None)
    judge(rows, outputs)
    assert rows[0].same_bytes is None
