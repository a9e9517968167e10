"""Weights in few bits: what a group becomes, and that this is what it stays."""

from __future__ import annotations

import pytest
import torch

from detgen.kernels.c.quantizing import fits, narrowed, quantize

WEIGHT = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 8)])
def test_errors_are_half_a_step(bits: int, steps: int) -> None:
    most = WEIGHT.view(20, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    error = (narrowed(WEIGHT, bits) - WEIGHT).abs()
    limit = 0.5 if bits == 8 else 1.0  # -8 has no counterpart
    assert (error <= most / steps * limit * 1.01).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_twice_is_once(bits: int) -> None:
    once = narrowed(WEIGHT, bits)
    again = quantize(once, bits)
    assert torch.equal(again.weight(), once)
    assert torch.equal(again.whole, quantize(WEIGHT, bits).whole)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros(bits: int) -> None:
    assert torch.equal(narrowed(torch.zeros(3, 64), bits), torch.zeros(3, 64))


def test_what_does_not_fit_stays() -> None:
    weight = WEIGHT[:, :40]
    assert not fits(weight)
    assert torch.equal(narrowed(weight, 8), weight)
    assert torch.equal(narrowed(WEIGHT, 0), WEIGHT)
