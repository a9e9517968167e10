"""Each kind of step, in each build, gives the bits of the interpreter, whatever the rows and the threads are."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.examples import examples, usual
from helpers.steps import CASES, PUT_IN_ORDER, Case, differences, numbers, odd_groups, odd_pairs, scored
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c.library import BUILDS, Runner, build
from detgen.kernels.c.panels import panels
from detgen.kernels.c.quantizing import MADE, PAIRED, Form
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.kernels.logprobs import Scores
from detgen.program import steps
from detgen.program.arrays import BFLOAT16, FLOAT32, same_bits
from detgen.program.interpreter import Interpreter
from detgen.program.operands import PAGE, SCORED, Buffer, Cache, Into, Step
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.steps import STEPS

LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
NONE = np.zeros((0, 4), np.int64)


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_it_gives_the_bits_of_the_interpreter(kind: type[Step]) -> None:
    """Buffers, caches and broken rows."""
    cases, count = CASES[kind]

    @examples(count)
    @given(case=cases, threads=st.integers(1, 4))
    def agree(case: Case, threads: int) -> None:
        wanted = case.after(Interpreter(case.program).run)
        for name, library in LIBRARIES.items():
            with using(threads):
                found = case.after(Runner(library, case.program).run)
            assert not differences(found, wanted), name

    agree()


@pytest.mark.parametrize("form", MADE)
def test_groups_that_do_not_become_whole_numbers(form: Form) -> None:
    """Groups of hardly any magnitude count as zeros; a number that is not finite makes its row NaN; ties go to even."""
    case = odd_groups(form)
    wanted = case.after(Interpreter(case.program).run)
    assert np.isnan(wanted["to[34]"]).all(1).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert not wanted["to[34]"][2].any()
    for name, library in LIBRARIES.items():
        assert not differences(case.after(Runner(library, case.program).run), wanted), name


@pytest.mark.parametrize("kind", [kind for kind in IN_FEW_BITS if kind[0].whole], ids=str)
def test_tables_in_few_bits(kind: InFewBits) -> None:
    """Entries are the numbers that the weights stand for, of more than a section, whether inputs are rounded or not."""
    made = in_few_bits(1, 40, 1280, *kind)
    to, ids, along = Buffer("to", 1280), np.array([39, 0, 31, 32, 7, -1]), np.arange(6)
    program = Program()
    program.add(steps.EmbedColumn(name="tokens", weight=panels([made]), to=Into(to)))
    rows = Rows(ids, along, along, along, *[NONE] * 2)
    want = np.concatenate([made.weight()[ids[:5]], np.zeros((1, 1280), np.float32)])
    for name, library in LIBRARIES.items():
        for exact in (False, True):
            Runner(library, program).run(rows, {to: (found := np.ones((6, 1280), np.float32))}, exact=exact)
            assert same_bits(found, want), name


@pytest.mark.parametrize("kind", IN_FEW_BITS + PUT_IN_ORDER, ids=str)
def test_weights_in_few_bits(kind: InFewBits) -> None:
    """Of more than a section, in all tiles of rows; they are the weights that they say."""
    made = in_few_bits(1, 40, 1280, *kind)
    x, to = Buffer("x", 1280), Buffer("to", 40)
    program = Program(x)
    program.add(steps.Linear(name="step", x=x, to=Into(to), weight=panels([made])))
    for rows in (1, 2, 6, 7, 97):
        along, read = np.arange(rows), numbers(2, rows, 1280)
        case = Case(program, {x: read, to: np.zeros((rows, 40), np.float32)}, Rows(*[along] * 4, *[NONE] * 2))
        wanted = case.after(Interpreter(program).run)
        for name, library in LIBRARIES.items():
            assert not differences(case.after(Runner(library, program).run), wanted), (name, rows)
    weight, norm = made.weight().astype(float).T, np.linalg.norm
    errors = wanted["to[40]"] - read.astype(float) @ weight
    assert norm(errors) < 0.02 * (norm(read.astype(float)) * norm(weight) / 1280**0.5)


@pytest.mark.parametrize("kind", [kind for kind in IN_FEW_BITS if kind[0].whole], ids=str)
def test_the_largest_sums(kind: InFewBits) -> None:
    """Sums of products in 16 bits hold what all of the largest weights and inputs give, of whatever signs."""
    made = in_few_bits(1, 40, 1280, *kind)
    extremes = np.array([made.whole.max(), made.whole.min()])
    along = np.arange(1280)
    whole = extremes[np.stack([(output >> along % 4) % 2 for output in range(40)])]
    read = np.stack([1 - 2 * ((row >> along % 4) % 2) for row in range(16)]).astype(np.float32)
    x, to, rows = Buffer("x", 1280), Buffer("to", 40), np.arange(16)
    program = Program(x)
    program.add(steps.Linear(name="step", x=x, to=Into(to), weight=panels([made._replace(whole=whole)])))
    case = Case(program, {x: read, to: np.zeros((16, 40), np.float32)}, Rows(*[rows] * 4, *[NONE] * 2))
    wanted = case.after(Interpreter(program).run)
    for name, library in LIBRARIES.items():
        assert not differences(case.after(Runner(library, program).run), wanted), name


@pytest.mark.parametrize("form", PAIRED)
def test_pairs_that_do_not_just_become_bf16(form: Form) -> None:
    """Zero below 2^-55, ties to even; a number that is not finite, or no longer is, stays in its row.

    In any number of rows, by any number of threads.
    """
    case = odd_pairs(form)
    wanted = case.after(Interpreter(case.program).run)
    assert np.isfinite(wanted["to[34]"]).sum(1).tolist() == [34] * 4 + [33, 7, 8, 33, 0, 0, 0, 33]
    x, to = case.program.buffers
    for rows, threads in ((1, 1), (2, 2), (4, 3), (5, 1), (7, 2), (12, 3), (13, 1), (97, 2), (512, 4)):
        along = np.arange(rows)
        again = Case(
            case.program,
            {x: case.given[x][along % 12], to: np.zeros((rows, 34), np.float32)},
            Rows(*[along] * 4, *case.rows[4:]),
        )
        want = {"to[34]": wanted["to[34]"][along % 12]}
        for name, library in LIBRARIES.items():
            with using(threads):
                assert not differences(again.after(Runner(library, case.program).run), want), (name, rows)


@examples(20)
@given(case=st.sampled_from([np.nan, np.inf]).flatmap(scored))
def test_scores_say_what_is_not_finite(case: Case) -> None:
    """Rows with such logits are told from the others, which have their scores."""
    to = f"to[{SCORED}]"
    wanted = case.after(Interpreter(case.program).run)[to]
    finite = Scores.of(wanted).finite
    for library in LIBRARIES.values():
        found = case.after(Runner(library, case.program).run)[to]
        assert np.array_equal(Scores.of(found).finite, finite)
        assert same_bits(found[finite], wanted[finite])


def test_each_kind_of_step_is_tried() -> None:
    assert CASES.keys() == set(STEPS)


@pytest.mark.parametrize("form", ["none", *PAIRED])
@pytest.mark.parametrize("name", LIBRARIES)
def test_linear_of_any_rows(name: str, form: Form) -> None:
    """Every row count gives a row the same bits; by default all up to 48, and a few others."""
    x, to = Buffer("x", 40), Buffer("to", 64)
    program = Program(x)
    weight = panels([numbers(2, 64, 40).astype(BFLOAT16 if form in PAIRED else FLOAT32)], form=form)
    program.add(steps.Linear(name="step", x=x, to=Into(to), weight=weight))
    runner, read = Runner(LIBRARIES[name], program), numbers(1, 512, 40)

    def results(rows: int) -> np.ndarray:
        out, along = np.empty((rows, 64), np.float32), np.arange(rows)
        runner.run(Rows(*[along] * 4, *[NONE] * 2), {x: read[512 - rows :], to: out})
        return out

    with using(2):
        want = results(512)
    for rows in usual([*range(1, 49), *range(61, 512, 31)], range(1, 512)):
        assert same_bits(results(rows), want[512 - rows :])


@pytest.mark.parametrize("within", [False, True])
def test_layers_with_wider_values(within: bool) -> None:
    """Sections that threads share have room for the widest values of all layers, in keys or beside them."""
    qkv, pages, along = Buffer("qkv", 2 * 96), 34, np.arange(3)
    rows = Rows(along, along + 2100, along, along, np.arange(pages)[None], np.array([[0, 2100, 3, 0]]))
    program, given = Program(qkv), {qkv: numbers(1, 3, qkv.width)}
    for values in (8, 96):
        keys, kept = numbers(2, pages, 1, 96, PAGE), None if within else numbers(3, pages, 1, PAGE, values)
        cache = Cache(heads=2, kv_heads=1, size=96, values=values, keys=keys, kept=kept)
        to = Buffer(f"to {values}", 2 * values)
        program.add(steps.Attend(name="attended", qkv=qkv, cache=cache, to=to, scale=0.2))
        given[to] = np.zeros((3, to.width), np.float32)
    case = Case(program, given, rows)
    wanted = case.after(Interpreter(program).run)
    for name, library in LIBRARIES.items():
        with using(4):
            found = case.after(Runner(library, program).run)
        assert not differences(found, wanted), name


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    """Keys and values are stored bounded, and a row whose keys are broken is named."""
    keys, kept = np.zeros((1, 1, 16, PAGE), np.float32), np.zeros((1, 1, PAGE, 16), np.float32)
    qkv, to = Buffer("qkv", 48), Buffer("to", 16)
    cache = Cache(heads=1, kv_heads=1, size=16, values=16, keys=keys, kept=kept)
    made = Program(qkv)
    made.add(steps.Rotate(name="rotated", qkv=qkv, cache=cache, last=True))
    made.add(steps.Attend(name="attended", qkv=qkv, cache=cache, to=to, scale=0.25))
    x = numbers(1, 5, 48)
    sound = x.copy()
    x[2, 17], x[2, 18], x[2, 40], x[4, 47] = np.nan, np.inf, -np.inf, np.nan
    out, want = np.empty((2, 5, 16), np.float32)
    along, table = np.arange(5), np.zeros((1, 1), np.int64)
    pieces = np.array([[0, 0, 5, 0]])
    broken = Runner(LIBRARIES[name], made).run(Rows(along, along, along, along, table, pieces), {qkv: x, to: out})
    assert broken.tolist() == [False, False, True, False, False]
    assert np.isfinite(keys).all()
    assert np.isfinite(kept).all()
    Runner(LIBRARIES[name], made).run(Rows(along, along, along, along, table, pieces), {qkv: sound, to: want})
    assert same_bits(out[:2], want[:2])
    assert np.isfinite(out[:2]).all()
