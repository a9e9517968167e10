"""Each kind of step in Triton has the bits of the program's interpreter: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.breaking import broken
from helpers.examples import examples, usual
from helpers.steps import PUT_IN_ORDER, caches_of, differences, odd_groups, odd_pairs
from helpers.steps import Case as Case_
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.kernels.attention import lay_out
from detgen.kernels.c.panels import joined, panels, stacked
from detgen.kernels.c.quantizing import MADE, PAIRED, STORAGE, Form
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.kernels.triton import attend, core_linear, linear, state_kernels, whole_linear
from detgen.kernels.triton.runner import KERNELS, TritonRunner
from detgen.program import arithmetic, interpreter, steps
from detgen.program.arrays import Array, array, each, same_bits, tensor
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.interpreter import Interpreter
from detgen.program.operands import (
    LOGIT_BLOCK,
    PAGE,
    PANEL,
    PART_INPUTS,
    SCORED,
    SECTION_BLOCKS,
    SECTION_PARTS,
    Activation,
    Buffer,
    Cache,
    Into,
    Scoring,
    Step,
    Weight,
    name_of,
)
from detgen.program.program import Program
from detgen.program.rows import NOT_A_NUMBER, Rows
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace, Watch
from detgen.program.steps import STEPS
from detgen.program.storage import Storage

LINEAR = [activation for activation in Activation if activation <= Activation.RELU_SQUARED]
NONE = torch.zeros(0, 4, dtype=torch.int64)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Of several magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g))


def on(device: str, step: Step) -> Any:
    """A step with its numbers in tensors on a device."""
    return each(step, lambda x: tensor(x).to(device))


def rows_of(count: int, wanted: torch.Tensor | None = None) -> Rows:
    along = torch.arange(count)
    return Rows(along, along, along, along.flip(0) if wanted is None else wanted, NONE, NONE)


def both(
    device: str, rows: Rows, buffers: Mapping[Buffer, Array], *made: Step
) -> dict[Buffer, tuple[torch.Tensor, torch.Tensor]]:
    """What both leave in the buffers that are given: Triton, and the interpreter."""
    program, other = Program(*buffers), Program(*buffers)
    for step in made:
        program.add(step)
        other.add(on(device, step))
    theirs = {b: tensor(x).clone().to(device) for b, x in buffers.items()}
    broken = Interpreter(program).run(rows, buffers)
    found = TritonRunner(other).run(rows.to(device), theirs)
    assert found.bool().cpu().equal(broken)
    return {buffer: (theirs[buffer].cpu(), tensor(x)) for buffer, x in buffers.items()}


def alike(device: str, rows: Rows, buffers: Mapping[Buffer, Array], *made: Step) -> dict[Buffer, torch.Tensor]:
    """The same, which have the same bits; whichever NaN is as good as another."""
    found = both(device, rows, buffers, *made)
    for buffer, (one, other) in found.items():
        assert same_bits(*(x.where(x == x, torch.nan) for x in (one, other))), buffer
    return {buffer: one for buffer, (one, _) in found.items()}


storages = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
INPUTS = st.sampled_from([1, 7, 31, 127, 128, 129, 260])


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


@examples(30)
@given(
    vectors=st.sampled_from([1, 3]),
    size=st.sampled_from([1, 15, 17, 64, 127, 128, 129, 300, 2048, 2049, 4500]),
    at=st.sampled_from([0, 5]),
    weighted=st.booleans(),
    biased=st.booleans(),
    own=st.booleans(),
    centred=st.booleans(),
    add=st.booleans(),
    factor=st.sampled_from([1.0, 0.3]),
    least=st.sampled_from([0.0, 2.0]),
)
def test_norm(
    device: str,
    vectors: int,
    size: int,
    at: int,
    weighted: bool,
    biased: bool,
    own: bool,
    centred: bool,
    add: bool,
    factor: float,
    least: float,
) -> None:
    shape = (vectors, size) if own and weighted else (size,)
    weight = numbers(2, *shape) if weighted else None
    bias = numbers(3, *shape) if weighted and biased else None
    x = Buffer("x", at + vectors * size)
    to = Buffer("to", x.width) if not at else x
    how = {"at": at, "vectors": vectors, "size": size, "weight": weight, "bias": bias, "own": own and weighted}
    into = Into(to, add=add, factor=factor)
    how |= {"epsilon": 1e-5, "centred": centred, "least": least}
    step = steps.Norm(name="norm", x=x, to=into, **how)  # type: ignore[arg-type]
    alike(device, rows_of(5), {x: numbers(1, 5, x.width) + 0.5, to: numbers(4, 5, to.width)}, step)


@examples(6)
@given(width=st.sampled_from([1, 16, 40, 300]), storage=storages, add=st.booleans(), factor=st.sampled_from([1.0, 0.3]))
def test_rows_of_tables(device: str, width: int, storage: torch.dtype, add: bool, factor: float) -> None:
    to = Buffer("to", width)
    table, into = numbers(1, 30, width).to(storage), Into(to, add=add, factor=factor)
    ids = torch.tensor([3, 0, -1, NOT_A_NUMBER, 29])
    positions = torch.tensor([4, 1, 0, 27, 2])
    rows = Rows(ids, positions, ids, ids, NONE, NONE)
    first = steps.Embed(name="tokens", table=table, storage=STORAGE[name_of(storage)], to=into)
    second = steps.EmbedPositions(name="positions", table=table, storage=STORAGE[name_of(storage)], offset=2, to=into)
    third = replace(first, to=Into(to, add=True), known=2)
    alike(device, rows, {to: numbers(2, 5, width)}, first, second, third)


@pytest.mark.parametrize("width", [1, 16, 300])
def test_copies(device: str, width: int) -> None:
    """All rows, the wanted ones, and rows that are gated; stored, and added."""
    x, gates, to, more, some, part, shared = (
        Buffer("x", width), Buffer("gates", 1), Buffer("to", width), Buffer("more", width), Buffer("some", width),
        Buffer("part", max(width - 3, 1)), Buffer("shared", max(width // 4, 1)),
    )  # fmt: skip
    buffers = {
        x: numbers(1, 6, width),
        gates: numbers(2, 6, 1) * 3,
        shared: numbers(7, 6, shared.width),
        to: numbers(3, 6, width),
        more: numbers(4, 6, width),
        some: torch.zeros(2, width),
        part: numbers(5, 6, part.width),
    }
    alike(
        device,
        rows_of(6, torch.tensor([4, 1])),
        buffers,
        steps.Copy(name="copy", x=x, to=Into(to, add=True, factor=0.3)),
        steps.Gate(name="gate", x=x, gates=gates, to=Into(more, add=True)),
        steps.Gate(name="gate", x=to, gates=gates, to=Into(x)),
        steps.Gate(name="gates", x=x, gates=to, to=Into(x), function=Activation.SILU),
        steps.Gate(name="gates of entries", x=x, gates=shared, to=Into(x)),
        steps.Gate(
            name="part", x=x, at=min(2, width - part.width), gates=part, to=Into(part), function=Activation.NONE
        ),
        steps.Copy(name="into a part", x=part, to=Into(more, add=True), at=width - part.width),
        steps.Copy(
            name="a part", x=x, at=width - part.width, to=Into(part, factor=0.3), factors=numbers(6, part.width)
        ),
        steps.Take(name="take", x=more, to=some),
    )


@pytest.mark.parametrize("size", [1, 17, 300])
@pytest.mark.parametrize("vectors", [1, 4])
def test_mixed_vectors(device: str, size: int, vectors: int) -> None:
    """Into others, added and not, and into themselves."""
    x, to = Buffer("x", vectors * size), Buffer("to", 3 * size)
    some, own = Buffer("some", 3 * vectors), Buffer("own", vectors * vectors)
    buffers = {each: numbers(i, 5, each.width) for i, each in enumerate((x, to, some, own))}
    alike(
        device,
        rows_of(5),
        buffers,
        steps.Mix(name="added", x=x, coefficients=some, to=Into(to, add=True), size=size),
        steps.Mix(name="in place", x=x, coefficients=own, to=Into(x, factor=0.3), size=size),
        steps.Mix(name="added in place", x=x, coefficients=own, to=Into(x, add=True), size=size),
    )


@pytest.mark.parametrize("size", [1, 17, 300, 2100])
def test_gaussian_top_k(device: str, size: int) -> None:
    x, to = Buffer("x", size), Buffer("to", size)
    found = numbers(1, 5, size)
    found[3] = torch.nan
    step = steps.GaussianTopK(name="step", x=x, to=to, deviations=0.7)
    left = alike(device, rows_of(5), {x: found, to: torch.zeros(5, size)}, step)[to]
    assert size < 100 or 0.02 < (left[0] > 0).float().mean() < 0.4


def test_xielu(device: str) -> None:
    x = Buffer("x", 61)
    found = numbers(1, 40, 61) * torch.logspace(-8, 2, 40)[:, None]
    found[0, :6] = torch.tensor([0.0, -0.0, -1e-6, -5e-7, torch.nan, -torch.inf])
    step = steps.Xielu(name="step", x=x, to=x, rise=1.3, fall=0.9, slope=0.5, least=-1e-6)
    alike(device, rows_of(40), {x: found}, step)


@pytest.mark.parametrize("function", list(Activation))
def test_activations(device: str, function: Activation) -> None:
    x, to = Buffer("x", 61), Buffer("to", 61)
    found = numbers(1, 40, 61) * torch.logspace(-6, 1, 40)[:, None]
    found[0, :8] = torch.tensor([0.0, -0.0, 0.625, -0.625, 1.0, -1.0, 88.0, -88.0])
    if function in (Activation.ROOT, Activation.RECIPROCAL_ROOT):
        found = found.abs()
    step = steps.Activate(name="step", x=x, to=Into(to, factor=0.3), function=function)
    alike(device, rows_of(40), {x: found, to: torch.zeros(40, 61)}, step)


@pytest.mark.parametrize("size", [1, 17, 128, 129, 300, 2048, 2100, 4500])
def test_softmax_and_sum(device: str, size: int) -> None:
    x, to, sums = Buffer("x", size), Buffer("to", size), Buffer("sums", 1)
    buffers = {x: 3 * numbers(1, 5, size), to: torch.zeros(5, size), sums: torch.zeros(5, 1)}
    alike(device, rows_of(5), buffers, steps.Softmax(name="softmax", x=x, to=to), steps.Sum(name="sum", x=x, to=sums))


@examples(10)
@given(
    heads=st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 2, 8), (3, 3, 20)]),
    turned=st.sampled_from([0, 2, 8]),
    interleaved=st.booleans(),
    last=st.booleans(),
    alone=st.booleans(),
    within=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rotation(
    device: str,
    heads: tuple[int, int, int],
    turned: int,
    interleaved: bool,
    last: bool,
    alone: bool,
    within: bool,
    dtype: torch.dtype,
) -> None:
    """In place, and what is stored, bounded and rounded; of queries alone, nothing is, nor are values in keys."""
    count, kv_heads, size = heads
    qkv = Buffer("qkv", (count + (0 if alone else kv_heads if within else 2 * kv_heads)) * size)
    x = numbers(1, 5, qkv.width)
    x[1, 0 if alone else count * size], x[2, -1] = torch.nan, torch.inf
    if not alone:
        x[3, count * size + 1] = -1e30
    angles = numbers(2, 40, turned // 2) if turned else None
    cosines, sines = (None if angles is None else f(angles) for f in (torch.cos, torch.sin))
    places = torch.tensor([3, 70, 64, 127, 0])
    rows = Rows(places, torch.tensor([0, 39, 4, 7, 1]), places, places, NONE, NONE)
    kept = []
    for where in ("cpu", device):
        keys, values = (torch.zeros(3, kv_heads, *of, dtype=dtype) for of in ((size, PAGE), (PAGE, size)))
        sizes = {"heads": count, "kv_heads": kv_heads, "size": size, "values": size}
        cache = Cache(**sizes, keys=keys, kept=None if within else values, storage=STORAGE[name_of(dtype)])
        step = steps.Rotate(
            name="rotated", qkv=qkv, cache=cache, turned=turned, interleaved=interleaved, cosines=cosines, sines=sines,
            factors=numbers(3, 40) if last else None, last=last,
        )  # fmt: skip
        program, given = Program(qkv), {qkv: x.clone().to(where if kept else "cpu")}
        moved = on(device, step) if kept else step
        program.add(moved)
        if kept:
            broken = TritonRunner(program).run(rows.to(device), given).bool().cpu()
        else:
            broken = Interpreter(program).run(rows, given)
        stored = [x.cpu() for x in (moved.cache.keys, moved.cache.kept) if x is not None]
        kept.append((given[qkv].cpu(), *stored, broken))
    assert all(same_bits(a, b) for a, b in zip(*kept, strict=True))
    assert kept[0][-1].tolist() == [False, last and not alone, within and last and not alone, False, False]
    assert kept[0][1].any() != alone


class Windows(NamedTuple):
    """Windows of a slot each, some of one token, whose pages lie anywhere."""

    starts: list[int]
    lengths: list[int]

    def attend(
        self,
        heads: tuple[int, int, int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        within: bool = False,
        **how: Any,
    ) -> Case:
        """A step of query heads, key heads and their size, and what it reads; values may be within keys."""
        count, kv_heads, size = heads
        slots, ends = len(self.starts), [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
        blocks = -(-max(ends) // PAGE)
        pages = np.random.default_rng(seed).permutation(slots * blocks)
        tables = torch.from_numpy(pages.reshape(slots, blocks))
        positions = torch.cat([torch.arange(*span) for span in zip(self.starts, ends, strict=True)])
        pieces = lay_out(np.arange(slots), np.array(self.starts), np.array(self.lengths), count // kv_heads)
        keys = numbers(2, slots * blocks, kv_heads, size, PAGE).to(dtype)
        values = numbers(3, slots * blocks, kv_heads, PAGE, 6).to(dtype)
        sizes = {"heads": count, "kv_heads": kv_heads, "size": size, "values": 6}
        cache = Cache(**sizes, keys=keys, kept=None if within else values, storage=STORAGE[name_of(dtype)])
        qkv, to = Buffer("qkv", cache.row), Buffer("to", count * 6)
        step = steps.Attend(name="attention", qkv=qkv, cache=cache, to=to, **{"scale": 0.2} | how)
        rows = Rows(positions, positions, positions, positions, tables, pieces)
        return Case(step, rows, {qkv: numbers(1, len(positions), qkv.width), to: torch.zeros(len(positions), to.width)})


class Case(NamedTuple):
    """A step of attention, the rows, and what is in its buffers."""

    step: steps.Attend
    rows: Rows
    buffers: dict[Buffer, torch.Tensor]

    def put(self, x: float, entries: slice | int, *places: int, values: bool = False) -> None:
        """Change entries of all keys, or values, at places of the first slot."""
        for place in places:
            page, at = int(self.rows.tables[0, place // PAGE]), place % PAGE
            if values:
                self.step.cache.kept[page, :, at, entries] = x
            else:
                self.step.cache.keys[page, :, entries, at] = x

    def results(self, device: str) -> torch.Tensor:
        """What both give, [rows, heads * values]."""
        return alike(device, self.rows, self.buffers, self.step)[self.step.to]


@pytest.fixture
def section(device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The keys of a section: a quarter of them in the interpreter, which takes long for each."""
    if device != "cpu":
        return SECTION
    for reader in (attend, interpreter):
        monkeypatch.setattr(reader, "SECTION_BLOCKS", SECTION_BLOCKS // 4)
    monkeypatch.setattr(attend, "_BLOCKS", SECTION_BLOCKS // 4)
    return SECTION // 4


@examples(8)
@given(
    heads=st.sampled_from([(1, 1, 8), (4, 2, 8), (6, 2, 12), (8, 1, 8), (70, 1, 10)]),
    within=st.booleans(),
    window=st.sampled_from([0, 0, 1, 20, 100]),
    chunk=st.sampled_from([0, 0, 33, 64]),
    softcap=st.sampled_from([0.0, 3.0]),
    length=st.integers(1, 19),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sinks=st.booleans(),
    slopes=st.booleans(),
)
def test_attention(
    device: str,
    heads: tuple[int, int, int],
    within: bool,
    window: int,
    chunk: int,
    softcap: float,
    length: int,
    seed: int,
    dtype: torch.dtype,
    sinks: bool,
    slopes: bool,
) -> None:
    """Windows at several places of sequences."""
    windows, how = Windows([0, 61, 130, 5], [length, 5, 1, 1]), {"window": window, "chunk": chunk, "softcap": softcap}
    for name in [name for name, has in {"sinks": sinks, "slopes": slopes}.items() if has]:
        how[name] = numbers(seed, heads[0]).abs()
    windows.attend(heads, seed, dtype, within=within, **how).results(device)


SECTION = SECTION_BLOCKS * PAGE


# Heads, and by how long a section is: where windows begin, and how they attend.
OVER_SECTIONS: list[tuple[tuple[int, int, int], Callable[[int], tuple[list[int], dict[str, Any]]]]] = [
    ((1, 1, 4), lambda n: ([n - 3, 2 * n - 2], {"scale": 1.3})),  # rows on both sides of where sections meet
    ((4, 2, 4), lambda n: ([n + 200], {"chunk": n - 6, "window": 230, "softcap": 0.7})),
    ((4, 2, 4), lambda n: ([n - 2], {"sinks": torch.tensor([0.0, -3.0, 9.0, torch.inf])})),
    ((20, 1, 9), lambda n: ([n - 2, 2 * n], {"within": True})),
    ((4, 2, 4), lambda n: ([n - 2, 2 * n], {"slopes": torch.tensor([0.5, 0.25, 0.01, 0.0])})),
    ((3, 1, 4), lambda n: ([n + 40], {"window": n - 76})),  # from the middle of a block of the section before
    ((4, 1, 4), lambda n: ([n + 70], {"window": 90, "softcap": 2.0})),
    ((3, 1, 4), lambda n: ([n + 94, 2 * n], {"chunk": n + 97})),  # begins among the rows, in the middle of a block
]


@pytest.mark.parametrize(("heads", "case"), usual(OVER_SECTIONS[:3], OVER_SECTIONS[3:]))
def test_sections_of_attention(
    device: str, section: int, heads: tuple[int, int, int], case: Callable[[int], tuple[list[int], dict[str, Any]]]
) -> None:
    starts, how = case(section)
    Windows(starts, [5] * len(starts)).attend(heads, **how).results(device)


def test_small_tiles_of_attention(device: str, section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries of a program, as a GPU has them, and one query head at a time, or two, or three of six."""
    monkeypatch.setattr("detgen.kernels.triton.attend.tile", lambda _size, _most: 4)
    of_head = 4 * 6 * 2 * PAGE  # bytes of two sections of six rows
    several = ((1, (6, 2, 4)), (3 * of_head + 1, (6, 1, 6)))
    for most, heads in usual(several[1:], [*several, (2 * of_head, (6, 1, 6))]):
        monkeypatch.setattr("detgen.kernels.triton.attend._MOST", most)
        Windows([section - 2, 3], [5, 1]).attend(heads, window=120, within=heads[1] == 1).results(device)


def test_scores_that_are_not_finite(device: str, section: int) -> None:
    """Of a key, of a block and of a section, each -inf: they weigh nothing. A row that sees NaN or inf is NaN."""
    case = Windows([section + 200], [12]).attend((2, 1, 4), window=section + 20)
    qkv = case.buffers[case.step.qkv]
    qkv[:, 0] = 1e30  # of the first head
    case.put(0.0, 0, *range(section + 212))
    first = case.results(device)
    assert first.isfinite().all()
    case.put(-1e18, 0, *range(section), *range(section + 64, section + 128), section + 150)
    second = case.results(device)
    assert second.isfinite().all()
    assert not same_bits(first, second)
    for bad in (torch.nan, 1e18):
        case.put(bad, 0, 185)  # what the first five rows see
        found = case.results(device)[:, :6]
        assert found.isnan().all(1).tolist() == [True] * 5 + [False] * 7
        assert same_bits(found[5:], second[5:, :6])
        case.put(-1e18, 0, 185)
    case.put(-1e18, 0, *range(section + 212))
    assert case.results(device)[:, :6].isnan().all()


def test_what_is_not_seen_is_not_read(device: str) -> None:
    """A number that is not finite, in front of a row's window or behind its position, changes nothing."""
    case = Windows([90], [8]).attend((2, 1, 4), window=30)
    clean = case.results(device)
    for values in (False, True):
        case.put(torch.nan, slice(None), *range(64), 94, *range(98, 128), values=values)
    found = case.results(device)
    # Rows at 90 to 92 see what is in front of 64, those from 94 on what is there.
    assert found.isnan().all(1).tolist() == [True] * 3 + [False] + [True] * 4
    assert same_bits(found[3], clean[3])


@pytest.mark.parametrize(
    ("form", "experts", "picks", "rows"),
    [
        *(("none", *of, 6) for of in usual(((5, 2), (150, 2)), ((40, 3), (4, 4)))),
        *((form, 5, 2, 3) for form in usual(("tc25", "q8"), (*PAIRED, *MADE))),
    ],
)
def test_experts(device: str, form: Form, experts: int, picks: int, rows: int) -> None:
    """Routes, what each of a row's experts gives, and their sum."""
    hidden, inner = 32, 40 if form == "none" else 64
    up, down = numbers(1, experts, 2 * inner, hidden) * 0.2, numbers(2, experts, hidden, inner) * 0.2
    weighed = Buffer("weighed", picks * hidden)  # which is read, or x is
    x, logits, routes = Buffer("x", hidden), Buffer("logits", experts), Buffer("routes", 2 * picks)
    made, each, to = Buffer("made", picks * inner), Buffer("each", picks * hidden), Buffer("to", hidden)
    several = numbers(4, rows, experts)
    several[1, 3] = several[1, 1]  # a tie, of which the first is taken
    for normalized in (True, False):
        kept = Buffer("kept", experts)  # where the interpreter leaves probabilities
        buffers = {
            x: numbers(3, rows, hidden),
            logits: several,
            routes: torch.zeros(rows, 2 * picks),
            made: torch.zeros(rows, made.width),
            each: torch.zeros(rows, each.width),
            to: numbers(5, rows, hidden),
        }
        found = alike(
            device,
            rows_of(rows),
            buffers,
            steps.Copy(name="kept", x=logits, to=Into(kept)),
            Route(name="routes", x=kept, to=routes, normalized=normalized),
            Sort(name="sorted", routes=routes, experts=experts),
            Weigh(name="weighed", x=x, routes=routes, to=weighed),
            ExpertLinear(
                name="up", x=x if normalized else weighed, routes=routes, to=made,
                weight=_stacked(up, form, gated=True, biased=normalized),
                activation=Activation.SILU, gated=True, limit=0.4 * normalized, slope=1.702, shift=1.0,
            ),
            ExpertLinear(name="down", x=made, routes=routes, to=each, weight=_stacked(down, form, biased=normalized)),
            Combine(name="sum", x=each, routes=routes, to=Into(to, add=True, factor=0.5), weighed=normalized),
        )  # fmt: skip
        assert found[routes][:, ::2].diff(dim=1).gt(0).all()


@pytest.mark.parametrize("picks", [1, 2, 5])
def test_routes_by_sparse_mixing(device: str, picks: int) -> None:
    """Logits that tie, that are close to each other and far, below zero and above."""
    experts, rows = 20, 9
    x, kept, routes = Buffer("logits", experts), Buffer("kept", experts), Buffer("routes", 2 * picks)
    logits = numbers(3, rows, experts)
    logits[2:4], logits[4], logits[5] = logits[2:4].round(), -100.0, logits[5].abs() - 9
    how: dict[str, Any] = {"scoring": Scoring.SPARSE, "normalized": False, "spread": 0.6}
    buffers = {x: logits, routes: torch.zeros(rows, 2 * picks)}
    route = Route(name="routes", x=kept, to=routes, **how)
    found = alike(device, rows_of(rows), buffers, steps.Copy(name="kept", x=x, to=Into(kept)), route)[routes]
    assert ((found[:, 1::2] > 0) & (found[:, 1::2] <= 1)).all()


SCORINGS = [scoring for scoring in Scoring if scoring != Scoring.SPARSE]
GROUPS = [(1, 1, 1), (4, 2, 1), (4, 3, 2), (20, 7, 2), (8, 1, 2)]  # how many, how many of them, by how many experts


@pytest.mark.parametrize(
    ("scoring", "grouped"),
    # With more than one group, and with one, each way to score is tried.
    usual(
        [*zip(SCORINGS, itertools.cycle(GROUPS[1:])), *((scoring, GROUPS[0]) for scoring in SCORINGS)],
        itertools.product(SCORINGS, GROUPS),
    ),
)
def test_routes_by_scores_and_groups(device: str, scoring: Scoring, grouped: tuple[int, int, int]) -> None:
    groups, best, of = grouped
    experts, picks, rows = 40, 5, 7
    x, kept, routes = Buffer("logits", experts), Buffer("kept", experts), Buffer("routes", 2 * picks)
    logits = numbers(groups, rows, experts)
    logits[2:4], logits[4] = logits[2:4].round(), -100.0  # ties; hardly any score
    how: dict[str, Any] = {"scoring": scoring, "groups": groups, "best_groups": best, "of_group": of, "factor": 2.5}
    for correction, factors in ((None, numbers(8, experts)), (numbers(9, experts).round(), None)):
        for normalized in {True, scoring == Scoring.OVER_PICKS}:  # the latter always are
            buffers = {x: logits.clone(), routes: torch.zeros(rows, 2 * picks)}
            own = {"correction": correction, "factors": factors}
            route = Route(name="routes", x=kept, to=routes, normalized=normalized, **own, **how)
            found = alike(device, rows_of(rows), buffers, steps.Copy(name="kept", x=x, to=Into(kept)), route)[routes]
            assert len((found[0, ::2] // (experts // groups)).unique()) <= best


def test_routes_of_what_is_no_number(device: str) -> None:
    """They are experts that there are, so that weights are read that there are."""
    x, routes = Buffer("x", 6), Buffer("routes", 4)
    program = Program(x, routes)
    program.add(Route(name="routes", x=x, to=routes, normalized=True))
    given = {x: torch.full((1, 6), torch.nan, device=device), routes: torch.full((1, 4), -7.0, device=device)}
    TritonRunner(program).run(rows_of(1).to(device), given)
    assert given[routes][0, ::2].tolist() == [0, 1]
    assert given[routes][0, 1::2].isnan().all()


def _stacked(weights: torch.Tensor, form: Form, *, gated: bool = False, biased: bool = False) -> Weight:
    dtype = torch.bfloat16 if form in PAIRED else torch.float32
    parts = [list(w.to(dtype).chunk(2)) if gated else [w.to(dtype)] for w in weights]
    biases = [[part[:, 0].float() for part in of] for of in parts] if biased else []
    return stacked(parts, PANEL // 2 if gated else PANEL, form, biases)


SPANS = [  # slot, first row, its position, rows, the position of the state, up to where rows are certain
    [2, 0, 7, 4, 5, 9],  # two rows are replayed, two stand, two are kept
    [0, 4, 0, 12, 0, 12],  # a new sequence, longer than the ring
    [0, 0, 0, 0, 0, 0],  # padding, which only Triton is given
    [1, 16, 30, 3, 28, 30],  # what is replayed stands, the rows do not
    [3, 19, 9, 2, 8, 8],  # a drafter's own rows move nothing
    [4, 21, 0, 2, 0, 1],
]


@pytest.mark.parametrize("small", usual([True], [False]))
@pytest.mark.parametrize("kind", [Convolve, DeltaRule, StateSpace, SelectiveScan])
def test_states(device: str, kind: type[Step], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes leave of states, too. With small tiles, and one sequence at a time."""
    if small:
        monkeypatch.setattr(state_kernels, "tile", lambda size, most: 8)
        monkeypatch.setattr(state_kernels, "_MOST", 1)
    rows, ring = rows_of(23)._replace(spans=torch.tensor([span for span in SPANS if span[3]])), 8
    padded = rows._replace(spans=torch.tensor(SPANS))
    if kind == Convolve:
        x, to = Buffer("x", 20), Buffer("to", 20)
        given = {x: numbers(1, 23, 20), to: torch.zeros(23, 20)}
        how: dict[str, Any] = {"weight": numbers(2, 3, 20), "bias": numbers(3, 20), "activation": Activation.SILU}
        step: Step = Convolve(name="step", x=x, to=to, taps=3, ring=ring, kept=numbers(4, 5, ring, 20), **how)
    elif kind == SelectiveScan:
        x, times, kq, to = Buffer("x", 40), Buffer("times", 40), Buffer("kq", 6), Buffer("to", 40)
        given = {b: numbers(i, 23, b.width) for i, b in enumerate((x, times, kq, to))}
        given[times][3, 1] = torch.nan
        how = {"x": x, "times": times, "kq": kq, "to": to, "size": 3, "values": 40, "ring": ring}
        how |= {"rates": -numbers(5, 3, 40).abs(), "bias": numbers(6, 40), "skip": numbers(9, 40)}
        step = SelectiveScan(name="step", state=numbers(7, 5, 1, 3, 40), kept=numbers(8, 5, ring, 83), **how)
    else:
        sizes: dict[str, Any] = {"heads": 4, "key_heads": 2, "size": 3, "values": 40, "ring": ring}
        qkv, decay, strength, to = Buffer("qkv", 172), Buffer("decay", 4), Buffer("strength", 4), Buffer("to", 160)
        given = {b: numbers(i, 23, b.width) for i, b in enumerate((qkv, decay, strength, to))}
        given[decay][3, 1] = torch.nan
        how = {"rates": -numbers(5, 4).abs(), "bias": numbers(6, 4), "qkv": qkv, "decay": decay, "to": to}
        how |= {"state": numbers(7, 5, 4, 3, 40), "kept": numbers(8, 5, ring, 6 + 160 + 8)} | sizes
        if kind == DeltaRule:
            step = DeltaRule(name="step", strength=strength, **how)
        else:
            step = StateSpace(name="step", skip=numbers(9, 4), **how, **({} if small else {"least": 0.5, "most": 1.5}))
    program, case = Program(*given), Case_(Program(*given), {b: array(x) for b, x in given.items()}, rows)
    program.add(on(device, step))
    case.program.add(each(step, array))

    def run(_: Rows, given: dict[Buffer, np.ndarray]) -> torch.Tensor:
        theirs = {b: tensor(x).to(device) for b, x in given.items()}
        broken = TritonRunner(program).run(padded.to(device), theirs).bool().cpu()
        for mine, other in zip(caches_of(case.program), caches_of(program), strict=True):
            np.copyto(mine, array(other))
        for buffer, x in given.items():
            np.copyto(x, array(theirs[buffer]))
        return broken

    assert differences(case.after(run), case.after(Interpreter(case.program).run)) == []


def test_rows_that_are_watched(device: str) -> None:
    x = Buffer("x", 300)
    rows = numbers(1, 6, 300)
    rows[1, 299], rows[3, 0], rows[4, 7] = torch.nan, -torch.inf, 3e38
    program = Program(x)
    program.add(Watch(name="watched", x=x))
    assert TritonRunner(program).run(rows_of(6).to(device), {x: rows.to(device)}).tolist() == [0, 1, 0, 1, 0, 0]


def test_a_strided_view_is_refused(device: str) -> None:
    x, to = Buffer("x", 8), Buffer("to", 8)
    program = Program(x, to)
    program.add(steps.Copy(name="copy", x=x, to=Into(to)))
    given = {x: torch.ones(3, 16, device=device)[:, ::2], to: torch.zeros(3, 8, device=device)}
    with pytest.raises(AssertionError, match="one row behind the other"):
        TritonRunner(program).run(rows_of(3).to(device), given)


def test_every_kind_of_step_has_a_kernel() -> None:
    assert set(KERNELS) == set(STEPS)


def test_a_kind_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KERNELS, steps.Sum)
    x = Buffer("x", 3)
    program = Program(x)
    program.add(steps.Sum(name="the sum", x=x, to=Buffer("to", 1)))
    with pytest.raises(EngineError, match="step 'the sum': Sum has no kernel for CUDA yet; use --device cpu"):
        TritonRunner(program)
