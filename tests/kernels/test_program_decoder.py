"""Copies of weights in fewer bits: those that rows give, of every number format, by every build."""

from __future__ import annotations

import copy as copying
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from detgen.kernels.c import quantizing
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import panels
from detgen.kernels.c.quantizing import MADE, Form
from detgen.kernels.program_decoder import FewerBits, form_of, sizes
from detgen.program import steps
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, same_bits
from detgen.program.operands import PANEL, Buffer, Into, Weight
from detgen.program.program import Program

KINDS: list[tuple[np.dtype[Any], Form]] = [
    (FLOAT32, "none"),
    (BFLOAT16, "none"),
    (FLOAT16, "none"),
    (BFLOAT16, "pairs"),
    (BFLOAT16, "tc25"),
]


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, np.float32)


def weight(dtype: np.dtype[Any], form: Form = "none") -> tuple[Weight, np.ndarray]:
    """One with a group of zeros, one of tiny numbers and one of large ones, in panels and as it is."""
    made = drawn(90, 96)
    made[5, :32], made[40, 32:64], made[2, :32] = 0, made[40, 32:64] * 1e-7, made[2, :32] * 1e4
    return panels([made.astype(dtype)], form=form), made.astype(dtype)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("made", ["q8", "q4", "q4_k"])
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_panels_are_quantized_as_rows_are(
    dtype: np.dtype[Any], form: Form, made: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (found := build(name)) is None:
        pytest.skip(f"no build {name} here")
    monkeypatch.setattr(quantizing, "best_build", lambda: found)
    own, rows = weight(dtype, form)
    copy, want = quantizing.quantized(own, made), panels([rows], form=made)
    assert list(copy.faults()) == []
    assert copy.storage == want.storage
    assert same_bits(copy.data, want.data)
    assert copy.scales is not None
    assert want.scales is not None
    for mine, theirs in zip(copy.scales.floats(-2), want.scales.floats(-2), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or same_bits(mine, theirs)


def test_forms() -> None:
    """Weights in few bits already, or whose groups are not whole, are not copied; those in 32 bits can be improved."""
    for improved in (False, True):
        for dtype, form in KINDS:
            found = [form_of(weight(dtype, form)[0], last=last, improved=improved) for last in (False, True)]
            assert found == ["q8" if improved and dtype == FLOAT32 else "q4_k", "q8"]
    for form in MADE:
        assert [form_of(panels([drawn(32, 64)], form=form), last=last) for last in (False, True)] == [None, None]
    assert form_of(panels([drawn(32, 40)]), last=False) is None


@pytest.mark.parametrize("inputs", [96, 256])
@pytest.mark.parametrize(("dtype", "form"), [*KINDS, (FLOAT32, "q8")])
def test_what_is_read_instead(dtype: np.dtype[Any], form: Form, inputs: int) -> None:
    """Copies, with their biases, of the layers and the output layer; the rest stays. Their sizes are known before."""
    program = Program(x := Buffer("x", inputs))
    for name in ("layer", "last"):
        own = panels([drawn(64, inputs).astype(dtype)], form=form)
        bias = drawn(own.columns)
        program.add(steps.Linear(name=name, x=x, to=Into(Buffer(name, 64)), weight=replace(own, bias=bias)))
    before = [step.weight for step in program.steps if isinstance(step, steps.Linear)]
    found = sizes(program)
    better, improved = copying.copy(program), FewerBits()
    better.steps = [*program.steps]
    assert improved.improve(better) == (dtype == FLOAT32 and form == "none")
    improved.of(better)
    after = [step.weight for step in FewerBits().of(program).steps if isinstance(step, steps.Linear)]
    assert all(a.bias is b.bias for a, b in zip(after, before, strict=True))
    copied = [weight for weight, own in zip(after, before, strict=True) if weight.data is not own.data]
    assert len(copied) == (0 if form == "q8" else 2)

    def bytes_of(weights: list[Weight]) -> int:
        return sum(w.data.nbytes + (0 if w.scales is None else w.scales.nbytes) for w in weights)

    most = [step.weight for step in better.steps if isinstance(step, steps.Linear)]
    assert found == (bytes_of(before), bytes_of(most) if copied else 0, bytes_of(after))


def test_experts_are_copied_one_behind_the_other() -> None:
    own, _ = weight(FLOAT32)
    stacked = replace(own, data=np.stack([own.data, 2 * own.data]))
    copy, one = quantizing.quantized(stacked, "q8"), quantizing.quantized(own, "q8")
    assert copy.data.shape == (2, *one.data.shape)
    assert same_bits(copy.data[0], one.data)
    assert copy.scales is not None
    assert one.scales is not None
    assert same_bits(copy.scales.steps[0], one.scales.steps)
    assert copy.scales.steps.shape[-1] == PANEL
