"""Steps on rows in Triton have the bits of the program's interpreter; what has no kernel, or no rows, is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples
from helpers.triton_steps import NONE, alike, numbers, rows_of, storages
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import STORAGE
from detgen.kernels.triton.runner import KERNELS, TritonRunner
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into, name_of
from detgen.program.program import Program
from detgen.program.rows import NOT_A_NUMBER, Rows
from detgen.program.states import Watch
from detgen.program.steps import STEPS


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
