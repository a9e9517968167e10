"""Linear layers in Triton have the bits of the program's interpreter: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.breaking import broken
from helpers.examples import examples, usual
from helpers.steps import PUT_IN_ORDER, odd_groups, odd_pairs
from helpers.triton_steps import alike, both, numbers, rows_of, storages
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c.panels import joined, panels, stacked
from detgen.kernels.c.quantizing import MADE, PAIRED, Form
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.kernels.triton import core_linear, linear, whole_linear
from detgen.program import arithmetic, steps
from detgen.program.arrays import same_bits
from detgen.program.operands import LOGIT_BLOCK, PANEL, PART_INPUTS, SCORED, SECTION_PARTS, Activation, Buffer, Into
from detgen.program.storage import Storage

INPUTS = st.sampled_from([1, 7, 31, 127, 128, 129, 260])
LINEAR = [activation for activation in Activation if activation <= Activation.RELU_SQUARED]


@examples(16)
@given(
    rows=st.sampled_from([1, 3, 17]),
    inputs=INPUTS | st.sampled_from([32, 160, 288]),
    outputs=st.sampled_from([1, 31, 33, 70]),
    storage=storages,
    form=st.sampled_from(["none", *PAIRED, *MADE]),
    activation=st.sampled_from(LINEAR),
    biased=st.booleans(),
    add=st.booleans(),
    factor=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
)
def test_linear(
    device: str,
    rows: int,
    inputs: int,
    outputs: int,
    storage: torch.dtype,
    form: Form,
    activation: Activation,
    biased: bool,
    add: bool,
    factor: float,
    softcap: float,
) -> None:
    weight = (numbers(2, outputs, inputs) * inputs**-0.5).to(torch.bfloat16 if form in PAIRED else storage)
    packed = joined([weight], [numbers(3, outputs)] if biased else [], form)
    x, to = Buffer("x", inputs), Buffer("to", outputs)
    into = Into(to, add=add and not softcap, factor=factor)
    step = steps.Linear(name="step", x=x, to=into, weight=packed, activation=activation, softcap=softcap)
    alike(device, rows_of(rows), {x: numbers(1, rows, inputs), to: numbers(4, rows, outputs)}, step)


@pytest.fixture
def inputs_of_a_section(device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """A quarter of them in the interpreter, which takes long for each."""
    if device != "cpu":
        return SECTION_PARTS * PART_INPUTS
    monkeypatch.setattr(arithmetic, "SECTION_PARTS", SECTION_PARTS // 4)
    monkeypatch.setattr(arithmetic, "_SECTION", inputs := SECTION_PARTS // 4 * PART_INPUTS)
    for kernels in (linear, core_linear, whole_linear):
        monkeypatch.setattr(kernels, "_SECTION", inputs)
    return inputs


@pytest.mark.parametrize(
    ("sections", "more", "form", "gated"),
    [
        (1, 0, "none", False),
        (2, 129, "none", False),
        (1, 96, "q4", True),
        (1, 256, "q4_k", True),
        (1, 134, "pairs", True),
        (1, 134, "tc25", True),
        (2, 18, "tc24", False),
    ],
)
def test_sections_of_a_linear_layer(
    device: str, inputs_of_a_section: int, sections: int, more: int, form: Form, gated: bool
) -> None:
    of_several_sections(device, sections * inputs_of_a_section + more, form, gated)


@pytest.mark.parametrize(("more", "form"), [(1, "none"), (32, "q4")])
def test_how_long_a_section_is(device: str, more: int, form: Form) -> None:
    of_several_sections(device, SECTION_PARTS * PART_INPUTS + more, form, False)


def of_several_sections(device: str, inputs: int, form: Form, gated: bool) -> None:
    dtype = torch.bfloat16 if form in PAIRED else torch.float32
    weights = [numbers(seed, 5, inputs).to(dtype) for seed in (2, 3)[: 1 + gated]]
    packed = joined(weights, [numbers(4, 5), numbers(5, 5)] if gated else [], form, gated=gated)
    x, to = Buffer("x", inputs), Buffer("to", 5)
    step = steps.Linear(name="step", x=x, to=Into(to), weight=packed, gated=gated)
    alike(device, rows_of(3), {x: numbers(1, 3, inputs), to: torch.zeros(3, 5)}, step)


@pytest.mark.parametrize("add", [False, True])
def test_layers_side_by_side(device: str, add: bool) -> None:
    """Of several kinds, into one buffer; what stands behind their columns stays."""
    x, to = Buffer("x", 256), Buffer("to", 33 + 5 + 16 + 20)
    few = IN_FEW_BITS[-1]
    weights = [joined([numbers(2, 33, 256)], [numbers(3, 33)]), joined([in_few_bits(4, 5, 256, *few)], [])]
    weights += [joined([numbers(5, 16, 256), numbers(6, 16, 256)], [], "q8", gated=True)]
    into, at = Into(to, add=add, factor=0.3), (0, 33, 38)
    made = [
        steps.Linear(name="step", x=x, to=into, at=first, weight=weight, gated=gated)
        for first, weight, gated in zip(at, weights, (False, False, True), strict=True)
    ]
    before = numbers(7, 3, to.width)
    found = alike(device, rows_of(3), {x: numbers(1, 3, 256), to: before}, *made)
    assert found[to][:, 54:].equal(before[:, 54:])


@pytest.mark.parametrize("kind", [kind for kind in IN_FEW_BITS if kind[0].whole], ids=str)
def test_tables_in_few_bits(device: str, kind: InFewBits) -> None:
    made, add = in_few_bits(1, 40, 512, *kind), kind[1] == Storage.HALF
    to, ids = Buffer("to", 512), torch.tensor([39, 0, 31, 32, 7, -1, -2])
    step = steps.EmbedColumn(name="tokens", weight=joined([made], []), to=Into(to, add=add, factor=0.3))
    found = alike(device, rows_of(7)._replace(ids=ids), {to: numbers(1, 7, 512)}, step)
    if not add:
        assert same_bits(found[to][:5], made.weight()[ids[:5]] * np.float32(0.3))


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, "none"),
        (torch.float16, "none"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "pairs"),
        (torch.bfloat16, "tc25"),
    ],
)
def test_tables_in_floats(device: str, dtype: torch.dtype, form: Form) -> None:
    """Which an output layer has, too."""
    table, to, ids = numbers(1, 40, 70).to(dtype), Buffer("to", 70), torch.tensor([39, 0, 31, 32, 7, -1, -2])
    step = steps.EmbedColumn(name="tokens", weight=joined([table], [], form), to=Into(to))
    found = alike(device, rows_of(7)._replace(ids=ids), {to: numbers(1, 7, 70)}, step)
    assert same_bits(found[to][:5], table[ids[:5]].float())


def test_a_sum_that_begins_with_minus_zero(device: str) -> None:
    """Products that are too small for a number, all of them negative, leave -0, as nothing is added to the first."""
    x, to = Buffer("x", 1100), Buffer("to", 2)
    step = steps.Linear(name="step", x=x, to=Into(to), weight=joined([torch.full((2, 1100), 1e-30)], []))
    found = alike(device, rows_of(1), {x: torch.full((1, 1100), -1e-30), to: torch.ones(1, 2)}, step)
    assert found[to].signbit().all()


def test_another_order_is_found(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no compiled code shows: a kernel that adds up a part from its end."""
    backwards = broken(linear, tmp_path, ("else turn\n", "else tl.minimum(first + _PART, inputs) - 1 - turn + first\n"))
    x, to = Buffer("x", 128), Buffer("to", 40)
    step = steps.Linear(name="step", x=x, to=Into(to), weight=joined([numbers(2, 40, 128)], []))
    monkeypatch.setattr(linear, "_linear", backwards._linear)
    with pytest.raises(AssertionError):
        alike(device, rows_of(3), {x: numbers(1, 3, 128), to: torch.zeros(3, 40)}, step)


@pytest.mark.parametrize("kind", IN_FEW_BITS + PUT_IN_ORDER, ids=str)
def test_weights_in_few_bits(device: str, kind: InFewBits) -> None:
    rows, inputs, outputs, gated = 5, 512, 34, kind[2] == 16
    packed = joined([in_few_bits(1, outputs, inputs, *kind)], [], gated=gated)
    x, to = Buffer("x", inputs), Buffer("to", outputs // (1 + gated))
    step = steps.Linear(name="step", x=x, to=Into(to), weight=packed, gated=gated)
    alike(device, rows_of(rows), {x: numbers(1, rows, inputs), to: torch.zeros(rows, to.width)}, step)


@examples(6)
@given(
    rows=st.sampled_from([1, 5]),
    inner=st.sampled_from([1, 16, 50]),
    biased=st.booleans(),
    storage=storages,
    form=st.sampled_from(["none", *PAIRED, *MADE]),
)
def test_gated_linear(device: str, rows: int, inner: int, biased: bool, storage: torch.dtype, form: Form) -> None:
    weights = [numbers(seed, inner, 160).to(torch.bfloat16 if form in PAIRED else storage) for seed in (2, 3)]
    packed = joined(weights, [numbers(4, inner), numbers(5, inner)] if biased else [], form, gated=True)
    x, to = Buffer("x", 160), Buffer("to", inner)
    step = steps.Linear(name="step", x=x, to=Into(to), weight=packed, gated=True, activation=Activation.SILU)
    alike(device, rows_of(rows), {x: numbers(1, rows, 160) * 0.1, to: torch.zeros(rows, inner)}, step)


@pytest.mark.parametrize("form", usual(["none", "pairs", "tc25", "q8", "q4_k"], ["none", *PAIRED, *MADE]))
@pytest.mark.parametrize(("passed", "rows"), [(0, 1), (10, 5), (64, 19)])
def test_linear_layers_of_heads(device: str, passed: int, rows: int, form: Form) -> None:
    """Each reads its own part of a row and writes beside what is passed on, in front of others' results."""
    heads, inputs, outputs = 3, 256 if form == "q4_k" else 64, 34
    kind = torch.bfloat16 if form in PAIRED else torch.float32
    packed = stacked([[(numbers(seed, outputs, inputs) * 0.1).to(kind)] for seed in range(heads)], PANEL, form)
    x, to = Buffer("x", heads * (passed + inputs)), Buffer("to", heads * (passed + outputs) + 7)
    given = {x: numbers(4, rows, x.width), to: numbers(5, rows, to.width)}
    found = alike(
        device,
        rows_of(rows),
        given,
        steps.HeadLinear(name="step", x=x, to=to, heads=heads, passed=passed, weight=packed),
    )[to]
    parts, read = (y.unflatten(1, (heads, -1))[..., :passed] for y in (found[:, :-7], given[x]))
    assert same_bits(parts, read)
    assert same_bits(found[:, -7:], given[to][:, -7:])


def test_a_tile_has_no_say(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter tiles are large: small ones, too, as a GPU has them."""
    monkeypatch.setattr("detgen.kernels.triton.launching.tile", lambda size, most: min(most, 32))
    x, to = Buffer("x", 40), Buffer("to", 70)
    for gated, packed in ((False, panels([numbers(2, 70, 40)])), (True, joined([numbers(2, 140, 40)], [], gated=True))):
        step = steps.Linear(name="step", x=x, to=Into(to), weight=packed, gated=gated)
        alike(device, rows_of(19), {x: numbers(1, 19, 40), to: torch.zeros(19, 70)}, step)
    x = Buffer("x", 64)
    for gated in (False, True):
        packed = joined([numbers(seed, 70, 64) for seed in (2, 3)[: 1 + gated]], [], "q4", gated=gated)
        step = steps.Linear(name="step", x=x, to=Into(to), weight=packed, gated=gated)
        alike(device, rows_of(40), {x: numbers(1, 40, 64), to: torch.zeros(40, 70)}, step)
    x, to = Buffer("x", 2 * 74), Buffer("to", 2 * 80)
    for form in ("none", "q4"):
        packed = stacked([[numbers(seed, 70, 64)] for seed in (2, 3)], PANEL, form)
        step = steps.HeadLinear(name="step", x=x, to=to, heads=2, passed=10, weight=packed)
        alike(device, rows_of(40), {x: numbers(1, 40, x.width), to: torch.zeros(40, to.width)}, step)


@pytest.mark.parametrize("form", MADE)
def test_groups_that_do_not_become_whole_numbers(device: str, form: Form) -> None:
    """Groups of hardly any magnitude count as zeros; a number that is not finite makes its row NaN; ties go to even."""
    case = odd_groups(form)
    found = alike(device, case.rows, case.given, case.program.steps[0])[Buffer("to", 34)]
    assert found.isnan().all(1).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert not found[2].any()


@pytest.mark.parametrize("form", usual(["pairs", "tc25"], PAIRED))
def test_pairs_that_do_not_just_become_bf16(device: str, form: Form) -> None:
    case = odd_pairs(form)
    alike(device, case.rows, case.given, case.program.steps[0])


@examples(8)
@given(
    rows=st.sampled_from([1, 6]),
    outputs=st.sampled_from([1, 15, 127, 128, 129, 400]),
    factor=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([0.0, 1.5]),
    spoiled=st.sampled_from([None, torch.inf, torch.nan]),
)
def test_scores(device: str, rows: int, outputs: int, factor: float, softcap: float, spoiled: float | None) -> None:
    weight = numbers(2, outputs, 24).mul(4).round()  # of which some are equal
    if spoiled is not None:
        weight[outputs // 2] = spoiled
    x, to = Buffer("x", 24), Buffer("to", SCORED)
    made = Buffer("blocks", SCORED * -(-outputs // LOGIT_BLOCK))
    one = steps.ScoredLinear(name="head", x=x, to=made, weight=joined([weight], []), factor=factor, softcap=softcap)
    start = {x: numbers(1, rows, 24).mul(2).round(), to: torch.zeros(rows, SCORED)}
    scores = steps.Score(name="scores", x=made, to=to)
    if spoiled is None:
        alike(device, rows_of(rows), {**start, made: torch.zeros(rows, made.width)}, one, scores)
    else:  # what is left of a row that is not finite is not stated, but that it is so
        for found in both(device, rows_of(rows), start, one, scores)[to]:
            assert not found[:, [0, 2]].isfinite().all(1).any()
