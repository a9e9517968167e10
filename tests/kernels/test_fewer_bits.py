"""Copies of weights in fewer bits: those that rows give, of every number format, by every build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from detgen.kernels.bits import same_bits
from detgen.kernels.c import quantizing
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import panels
from detgen.kernels.c.quantizing import Form
from detgen.kernels.fewer_bits import FewerBits, narrows, sizes
from detgen.program import steps
from detgen.program.operands import PANEL, Buffer, Into, Weight
from detgen.program.program import Program

KINDS: list[tuple[torch.dtype, Form]] = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float16, "none"),
    (torch.bfloat16, "pairs"),
]


def weight(dtype: torch.dtype, form: Form = "none") -> tuple[Weight, torch.Tensor]:
    """One with a group of zeros, one of tiny numbers and one of large ones, in panels and as it is."""
    torch.manual_seed(3)
    made = torch.randn(90, 96)
    made[5, :32], made[40, 32:64], made[2, :32] = 0, made[40, 32:64] * 1e-7, made[2, :32] * 1e4
    return panels([made.to(dtype)], form=form), made.to(dtype)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("made", ["q8", "q4", "q4_k"])
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_panels_are_quantized_as_rows_are(
    dtype: torch.dtype, form: Form, made: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (found := build(name)) is None:
        pytest.skip(f"no build {name} here")
    monkeypatch.setattr(quantizing, "best_build", lambda: found)
    own, rows = weight(dtype, form)
    copy, want = quantizing.quantized(own, made), panels([rows], form=made)
    assert list(copy.faults()) == []
    assert copy.storage == want.storage
    assert torch.equal(copy.data, want.data)
    assert copy.scales is not None
    assert want.scales is not None
    for mine, theirs in zip(copy.scales.floats(-2), want.scales.floats(-2), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or same_bits(mine, theirs)


def test_what_stays() -> None:
    """Weights in few bits already, or whose groups are not whole; the bias of those that are copied."""
    assert not narrows(panels([torch.randn(32, 64)], form="q8"))
    assert not narrows(panels([torch.randn(32, 40)]))
    own, _ = weight(torch.float32)
    bias = torch.randn(own.columns)
    x, to = Buffer("x", own.inputs), Buffer("to", own.outputs)
    step = steps.Linear(name="l", x=x, to=Into(to), weight=replace(own, bias=bias))
    program = Program(x)
    program.add(step)
    total = sizes(program)
    (changed,) = FewerBits().of(program).steps
    assert isinstance(changed, steps.Linear)
    assert changed.weight.bias is bias
    assert changed.weight.scales is not None
    copied = changed.weight.data.nbytes + changed.weight.scales.steps.nbytes
    assert total == (own.data.nbytes, copied)


def test_experts_are_copied_one_behind_the_other() -> None:
    own, _ = weight(torch.float32)
    stacked = replace(own, data=torch.stack([own.data, 2 * own.data]))
    copy, one = quantizing.quantized(stacked, "q8"), quantizing.quantized(own, "q8")
    assert copy.data.shape == (2, *one.data.shape)
    assert torch.equal(copy.data[0], one.data)
    assert copy.scales is not None
    assert one.scales is not None
    assert torch.equal(copy.scales.steps[0], one.scales.steps)
    assert copy.scales.steps.shape[-1] == PANEL
