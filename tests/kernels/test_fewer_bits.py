"""Copies of weights in 8 bits: as near as 8 bits can be, of every number format, by every build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from detgen.kernels import fewer_bits
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import panels
from detgen.kernels.fewer_bits import in_eight_bits, narrows, sizes
from detgen.program import steps
from detgen.program.operands import PANEL, Buffer, Into, Weight
from detgen.program.program import Program
from detgen.program.storage import Storage, unpack

KINDS = [(torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 16)]


def weight(dtype: torch.dtype, bits: int, outputs: int = 90, inputs: int = 96) -> tuple[Weight, torch.Tensor]:
    """One with a group of zeros, one of tiny numbers, and one of large ones; and its panels in float32."""
    torch.manual_seed(3)
    made = torch.randn(outputs, inputs)
    made[5, :32], made[40, 32:64] = 0, made[40, 32:64] * 1e-7
    made[2, :32] *= 1e4
    packed = panels([made.to(dtype)], bits=bits)
    whole = unpack(Storage.PAIR, packed.data) if packed.storage == Storage.PAIR else packed.data
    return packed, whole.float()


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(("dtype", "bits"), KINDS)
def test_each_number_is_the_nearest(dtype: torch.dtype, bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further away than half a scale, which is a 127th of the group's largest magnitude, rounded up."""
    if (found := build(name)) is None:
        pytest.skip(f"no build {name} here")
    monkeypatch.setattr(fewer_bits, "best_build", lambda: found)
    own, numbers = weight(dtype, bits)
    copy = in_eight_bits(own)
    assert list(copy.faults()) == []
    assert copy.storage == Storage.BYTE
    assert copy.scales is not None
    scales, _ = copy.scales.floats(-2)
    groups = numbers.unflatten(1, (-1, 32))
    least = groups.abs().amax(2) / 127
    assert (scales >= least * (1 - 1e-6)).all()
    assert (scales <= least * (1 + 2**-10) + 2**-24).all()
    made = unpack(Storage.BYTE, copy.data, -128).float().unflatten(1, (-1, 32)) * scales[:, :, None]
    assert ((made - groups).abs() <= scales[:, :, None] * 0.5001).all()


def test_what_stays() -> None:
    """Weights in few bits already, or whose groups are not whole; the bias of those that are copied."""
    assert not narrows(panels([torch.randn(32, 64)], bits=8))
    assert not narrows(panels([torch.randn(32, 40)]))
    own, _ = weight(torch.float32, 0)
    bias = torch.randn(own.columns)
    x, to = Buffer("x", own.inputs), Buffer("to", own.outputs)
    step = steps.Linear(name="l", x=x, to=Into(to), weight=replace(own, bias=bias))
    program = Program(x)
    program.add(step)
    total = sizes(program)
    (changed,) = fewer_bits.FewerBits().of(program).steps
    assert isinstance(changed, steps.Linear)
    assert changed.weight.bias is bias
    assert changed.weight.scales is not None
    copied = changed.weight.data.nbytes + changed.weight.scales.steps.nbytes
    assert total == (own.data.nbytes, copied)


def test_experts_are_copied_one_behind_the_other() -> None:
    own, _ = weight(torch.float32, 0)
    stacked = replace(own, data=torch.stack([own.data, 2 * own.data]))
    copy, one = in_eight_bits(stacked), in_eight_bits(own)
    assert copy.data.shape == (2, *one.data.shape)
    assert torch.equal(copy.data[0], one.data)
    assert copy.scales is not None
    assert one.scales is not None
    assert torch.equal(copy.scales.steps[0], one.scales.steps)
    assert copy.scales.steps.shape[-1] == PANEL
