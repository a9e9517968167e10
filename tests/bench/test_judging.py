from __future__ import annotations

from collections.abc import Callable

from detgen.bench.judging import judge
from detgen.bench.measuring import Outputs
from detgen.bench.rows import Row

MakeRow = Callable[..., Row]
CANONICAL = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
LATE = [[1, 2, 9], *CANONICAL[1:]]


def test_a_verified_row_must_equal_drafter_none(make_row: MakeRow) -> None:
    rows, outputs = [make_row(), make_row("detgen auto")], Outputs()
    outputs.keep("sample", "detgen none", 4, CANONICAL)
    outputs.keep("sample", "detgen auto", 4, LATE)
    judge(rows, outputs)
    assert rows[0].wrong is None
    assert rows[1].wrong == "1 of 4 verified prompts differ from drafter none"


def test_only_the_verified_prompts_of_a_mix_count(make_row: MakeRow) -> None:
    row, outputs = make_row("detgen none, 50% verified", fraction=0.5), Outputs()
    outputs.keep("sample", "detgen none", 4, CANONICAL)
    outputs.keep("sample", row.label, 4, [CANONICAL[0], [4, 9, 9], CANONICAL[2], [0, 0, 0]])
    judge([row], outputs)
    assert row.agreement == (2, 2)
    assert row.wrong is None


def test_a_peer_may_differ_later_but_not_from_the_start(make_row: MakeRow) -> None:
    late, early = make_row("transformers generate", fraction=None), make_row("openvino f32", fraction=None)
    outputs = Outputs()
    outputs.keep("sample", "detgen none", 4, CANONICAL)
    outputs.keep("sample", late.label, 4, LATE)
    outputs.keep("sample", early.label, 4, [[0, 2, 3]] * 4)
    judge([late, early], outputs)
    assert (late.agreement, late.wrong) == ((3, 4), None)
    assert early.wrong == "only 0 of 4 first tokens are right"


def test_a_verified_row_must_not_depend_on_the_batch_size(make_row: MakeRow) -> None:
    row, outputs = make_row(), Outputs()
    outputs.keep("sample", row.label, 4, CANONICAL)
    outputs.keep("sample", row.label, 1, LATE[:2])
    judge([row], outputs)
    assert row.same_bytes == (1, 2, 1)
    assert row.wrong == "verified prompts differ between batch sizes 4 and 1"


def test_the_furthest_batch_size_is_compared(make_row: MakeRow) -> None:
    row, outputs = make_row(), Outputs()
    for size in (4, 8, 32, 2):
        outputs.keep("sample", row.label, size, CANONICAL)
    judge([row], outputs)
    assert row.same_bytes == (4, 4, 32)


def test_rows_with_errors_are_left_alone(make_row: MakeRow) -> None:
    row = make_row(error="out of memory", seconds=[])
    judge([row], Outputs())
    assert row.same_bytes is None
    assert row.wrong is None
