from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.rows import make_row

from detgen.bench import measuring
from detgen.bench.bench_results import Row
from detgen.bench.cells import Cell
from detgen.bench.measuring import Measuring, Outputs, Tokens, judge
from detgen.bench.peer_interface import Contender, Job, Outcome, Prompt, Workload
from detgen.bench.processor_time import Others
from detgen.worker import WorkerError

CANONICAL = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
LATE = [[1, 2, 9], *CANONICAL[1:]]


def outputs_of(tokens: dict[str, dict[int, Tokens]]) -> Outputs:
    return defaultdict(dict, {("sample", label): by_size for label, by_size in tokens.items()})


def test_a_verified_row_must_equal_drafter_none() -> None:
    rows = [make_row(), make_row("detgen auto")]
    judge(rows, outputs_of({"detgen none": {4: CANONICAL}, "detgen auto": {4: LATE}}))
    assert rows[0].wrong is None
    assert rows[1].wrong == "1 of 4 verified prompts differ from drafter none"


def test_only_the_verified_prompts_of_a_mix_count() -> None:
    row = make_row("detgen none, 50% verified", fraction=0.5)
    mixed = [CANONICAL[0], [4, 9, 9], CANONICAL[2], [0, 0, 0]]
    judge([row], outputs_of({"detgen none": {4: CANONICAL}, row.label: {4: mixed}}))
    assert row.agreement == (2, 2)
    assert row.wrong is None


def test_a_peer_may_differ_later_but_not_from_the_start() -> None:
    late, early = make_row("transformers generate", fraction=None), make_row("openvino f32", fraction=None)
    judge(
        [late, early],
        outputs_of({"detgen none": {4: CANONICAL}, late.label: {4: LATE}, early.label: {4: [[0, 2, 3]] * 4}}),
    )
    assert (late.agreement, late.wrong) == ((3, 4), None)
    assert early.wrong == "only 0 of 4 first tokens are right"


def test_fewer_bits_may_give_other_first_tokens_but_not_all_others() -> None:
    one, none = [[1, 0, 0], [0], [0], [0]], [[0], [0], [0], [0]]
    plain = make_row("llama.cpp f32", fraction=None)
    few, wrong = (make_row(f"llama.cpp {name}", fraction=None, fewer_bits=True) for name in ("q4_0", "q8_0"))
    outputs = {"detgen none": {4: CANONICAL}, plain.label: {4: one}, few.label: {4: one}, wrong.label: {4: none}}
    judge([plain, few, wrong], outputs_of(outputs))
    assert plain.wrong == "only 1 of 4 first tokens are right"
    assert few.wrong is None
    assert wrong.wrong == "only 0 of 4 first tokens are right"


def test_rows_in_few_bits_are_held_against_their_own_reference() -> None:
    """They have texts of their own; what they share with float32's is shown, and is nothing wrong."""
    own = [[1, 2, 8], [4, 5, 8], [7, 8, 8], [1, 1, 8]]
    none, good, bad = (
        make_row(f"detgen {name}, q8", fraction=1.0, reference="detgen none, q8") for name in ("none", "auto", "ngram")
    )
    outputs = outputs_of(
        {
            "detgen none": {4: CANONICAL},
            none.label: {4: own},
            good.label: {4: own},
            bad.label: {4: [*own[:3], CANONICAL[3]]},
        }
    )
    judge([none, good, bad], outputs)
    assert [row.agreement for row in (none, good, bad)] == [(0, 4), (0, 4), (1, 4)]
    assert (none.wrong, good.wrong) == (None, None)
    assert bad.wrong == "1 of 4 verified prompts differ from drafter none"


def test_a_verified_row_must_not_depend_on_the_batch_size() -> None:
    row = make_row()
    judge([row], outputs_of({row.label: {4: CANONICAL, 1: LATE[:2]}}))
    assert row.same_bytes == (1, 2, 1)
    assert row.wrong == "verified prompts differ between batch sizes 4 and 1"


def test_the_furthest_batch_size_is_compared() -> None:
    row = make_row()
    judge([row], outputs_of({row.label: dict.fromkeys((4, 8, 32, 2), CANONICAL)}))
    assert row.same_bytes == (4, 4, 32)


def test_rows_with_errors_are_left_alone() -> None:
    row = make_row(error="out of memory", seconds=[])
    judge([row], outputs_of({}))
    assert row.same_bytes is None
    assert row.wrong is None


PROMPTS = tuple(Prompt((i + 1,), 3) for i in range(4))


def contender(peer: str, name: str, fraction: float | None = None) -> Contender:
    return Contender(peer, name, "float32", peer, fraction=fraction)


NGRAM, NONE = contender("detgen", "ngram", 1.0), contender("detgen", "none", 1.0)
GENERATE = contender("transformers", "generate")


class Fake:
    """Runs jobs in no time: each contender takes its seconds and gives its tokens."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[str] = []
        self.tokens: Callable[[str, Job], list[list[int]]] = lambda name, job: [[7] * 3 for _ in job.prompts]

    def run(self, contender: Contender, job: Job) -> Outcome:
        self.calls.append(contender.name)
        name = contender.name.replace(" ", "_")
        if name not in self.seconds:
            raise WorkerError("out of memory")
        taken = self.seconds[name] * (1 + 0.1 * len(self.calls))
        n = len(job.prompts)
        moments = [0.1] * n, [0.3] * n
        return Outcome(self.tokens(name, job), taken, *moments, 10, {"drafted": 4}, memory=100, cpu_seconds=2 * taken)


def measure(
    fake: Fake, told: Any, *contenders: Contender, rounds: int | None = 3, seconds: float = 100.0
) -> tuple[list[Row], Outputs]:
    cell = Cell(Workload("sample", PROMPTS, ""), 4, contenders)
    return Measuring([cell], fake, told, rounds, seconds).run()


def test_contenders_take_turns_and_the_first_round_is_not_measured(told: Any) -> None:
    fake = Fake(ngram=1.0, none=2.0, generate=4.0)
    rows, _ = measure(fake, told, NGRAM, NONE, GENERATE)
    assert fake.calls == ["ngram", "none", "generate"] * 4
    assert [len(r.seconds) for r in rows] == [3, 3, 3]
    assert rows[1].ttft[0] == pytest.approx((0.1, 0.1))
    assert rows[1].tpot[0] == pytest.approx((0.1, 0.1)), "two tokens behind the first in 0.2 seconds"
    assert (rows[1].output_tokens, rows[1].passes, rows[1].memory) == (12, 10, 100)


def test_a_row_has_its_processor_time_and_that_of_others(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(none=2.0)
    moments = iter([Others(0.5, 4.0), None, Others(0.1, 4.0)])
    monkeypatch.setattr(measuring, "OthersClock", lambda: SimpleNamespace(read=lambda: next(moments)))
    ((row,), _) = measure(fake, told, NONE)
    assert row.cpu_seconds == [2 * s for s in row.seconds]
    assert row.others == [(0.5, 4.0), (0.1, 4.0)], "where the system tells it"
    ((failed,), _) = measure(Fake(), told, NONE)
    assert (failed.cpu_seconds, failed.others) == ([], [])


def test_what_the_library_chose_replaces_what_was_known_before(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(default=1.0)
    plain = fake.run
    chosen: dict[str, Any] = {"precision": "f32, u8 cache", "fewer_bits": True, "weights": "bfloat16"}

    def run(contender: Contender, job: Job) -> Outcome:
        outcome = plain(contender, job)
        for name, value in chosen.items():
            setattr(outcome, name, value)
        return outcome

    monkeypatch.setattr(fake, "run", run)
    ((row,), _) = measure(fake, told, replace(contender("openvino", "default"), fewer_bits=True))
    assert (row.precision, row.fewer_bits, row.weights) == ("f32, u8 cache", True, "bfloat16")
    chosen |= {"precision": "f32, f32 cache", "fewer_bits": False}
    ((row,), _) = measure(fake, told, replace(contender("openvino", "default"), fewer_bits=True))
    assert not row.fewer_bits


def test_ratios_are_of_the_same_round(told: Any) -> None:
    rows, _ = measure(Fake(ngram=1.0, none=2.0, generate=4.0), told, NGRAM, NONE, GENERATE)
    ngram, none, generate = rows
    assert ngram.over_none == pytest.approx([n / g for n, g in zip(none.seconds, ngram.seconds, strict=True)])
    assert none.over_transformers == pytest.approx([g / n for n, g in zip(none.seconds, generate.seconds, strict=True)])
    assert none.over_none == [1.0] * 3


def test_a_contender_that_fails_is_a_row_with_its_error_and_the_others_go_on(told: Any) -> None:
    fake = Fake(ngram=1.0, generate=1.0)
    rows, _ = measure(fake, told, NGRAM, NONE, GENERATE)
    assert rows[1].error == "out of memory"
    assert rows[1].seconds == []
    assert fake.calls.count("none") == 1, "it is not tried again"
    assert len(rows[2].seconds) == 3


def test_rounds_fill_the_time_within_bounds(told: Any) -> None:
    for seconds, rounds in ((100.0, 7), (0.0, 3)):
        rows, _ = measure(Fake(none=1.0), told, NONE, rounds=None, seconds=seconds)
        assert len(rows[0].seconds) == rounds
        assert told.steps[-1].done == told.steps[-1].total


def test_progress_counts_every_run_to_the_end(told: Any) -> None:
    measure(Fake(ngram=1.0, none=1.0), told, NGRAM, NONE, rounds=5)
    assert [step.done for step in told.steps] == list(range(13))
    assert {step.total for step in told.steps} == {12}
    assert told.steps[0].left is None
    assert told.steps[-1].left == 0
    assert told.steps[0].figures == ("sample, batch 4: detgen ngram",)


def test_rows_are_kept_after_each_round(told: Any) -> None:
    """Those of finished cells and of the present one, with what each round gave, ratios among it."""
    seen: list[list[tuple[int, str, int, int]]] = []

    def keep(rows: list[Row], outputs: Outputs) -> None:
        assert {(r.workload, r.label) for r in rows if r.error is None} == set(outputs)
        seen.append([(r.batch_size, r.label, len(r.seconds), len(r.over_none)) for r in rows])

    cells = [Cell(Workload("sample", PROMPTS, ""), size, (NGRAM, NONE)) for size in (4, 1)]
    Measuring(cells, Fake(ngram=1.0, none=1.0), told, 2, 100.0, keep=keep).run()
    labels = "detgen ngram", "detgen none"
    first, second, third, fourth = ([(size, label, n, n) for label in labels] for size in (4, 1) for n in (1, 2))
    assert seen == [first, second, second + third, second + fourth]


def test_a_verified_row_whose_rounds_differ_is_wrong(told: Any) -> None:
    fake = Fake(none=1.0)
    fake.tokens = lambda name, job: [[len(fake.calls)] * 3 for _ in job.prompts]
    rows, _ = measure(fake, told, NONE)
    assert rows[0].wrong == "two rounds gave different tokens"


@pytest.mark.parametrize(("differs", "wrong"), [(0, True), (1, False)])
def test_of_a_partly_verified_row_the_verified_requests_must_not_differ(told: Any, differs: int, wrong: bool) -> None:
    fake = Fake(none=1.0)
    fake.tokens = lambda name, job: [[len(fake.calls) if i == differs else 7] * 3 for i in range(len(job.prompts))]
    ((row,), _) = measure(fake, told, contender("detgen", "none", 0.5))
    assert row.wrong == ("two rounds gave different tokens" if wrong else None)


def test_a_second_batch_size_is_run_where_no_cell_has_one(told: Any) -> None:
    fake = Fake(none=1.0, generate=1.0)
    fake.tokens = lambda name, job: [[job.batch_size if name == "generate" else 7] * 3 for _ in job.prompts]
    checked = [replace(c, self_checked=True) for c in (NONE, GENERATE)]
    rows, outputs = measure(fake, told, *checked, rounds=1)
    assert fake.calls == ["none", "generate"] * 3, "warm-up, round, comparison"
    assert told.steps[-2].figures == ("sample, batch 2 for comparison: transformers generate",)
    judge(rows, outputs)
    assert [r.same_bytes for r in rows] == [(4, 4, 2), (0, 4, 2)]
    assert [r.wrong for r in rows] == [None, "only 0 of 4 first tokens are right"]
    assert rows[1].agreement == (0, 4)


def test_two_cells_are_compared_with_each_other(told: Any) -> None:
    fake = Fake(none=1.0)
    cells = [Cell(Workload("sample", PROMPTS, ""), size, (replace(NONE, self_checked=True),)) for size in (4, 1)]
    rows, outputs = Measuring(cells, fake, told, 1, 100.0).run()
    judge(rows, outputs)
    assert len(fake.calls) == 4
    assert [r.same_bytes for r in rows] == [(4, 4, 1), (4, 4, 4)]


def test_a_failure_of_the_comparison_leaves_it_out(told: Any) -> None:
    fake = Fake(none=1.0)

    def tokens(name: str, job: Job) -> list[list[int]]:
        if job.batch_size == 2:
            raise WorkerError("out of memory")
        return [[7] * 3 for _ in job.prompts]

    fake.tokens = tokens
    rows, outputs = measure(fake, told, replace(NONE, self_checked=True))
    judge(rows, outputs)
    assert rows[0].same_bytes is None
