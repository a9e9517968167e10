from __future__ import annotations

from collections import defaultdict

from helpers.rows import make_row

from detgen.bench.correctness import Outputs, Tokens, judge

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
