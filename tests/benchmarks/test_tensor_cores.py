"""The rule of tensor cores: what the emulator gives is what exact fractions give by its words."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu.tensor_cores import AMPERE, HOPPER, Rule, cases, emulated, rule_of


def exponent(x: float) -> int:
    return max(math.frexp(x)[1] - 1, -126) if x else -126


def cut(x: Fraction, at: int) -> Fraction:
    """x toward zero, to a multiple of 2^at."""
    unit = Fraction(2) ** at
    return math.trunc(x / unit) * unit


def one(a: list[float], b: list[float], start: float, rule: Rule) -> float:
    """An entry of a product."""
    total = Fraction(start)
    for first in range(0, len(a), rule.inputs):
        pairs = list(zip(a, b, strict=True))[first : first + rule.inputs]
        largest = max(exponent(float(total)), *(exponent(x) + exponent(y) for x, y in pairs))
        added = [total, *(Fraction(x) * Fraction(y) for x, y in pairs)]
        exact = sum((cut(x, largest - rule.bits) for x in added), Fraction(0))
        # 24 bits, or as many as float32 has there.
        size = max(math.frexp(float(exact))[1] - 24, -149) if exact else 0
        total = cut(exact, size)
    return float(total)


@pytest.mark.parametrize("rule", [HOPPER, AMPERE], ids=str)
@pytest.mark.parametrize("name", cases(16, 2))
def test_the_emulator_says_what_the_rule_says(rule: Rule, name: str) -> None:
    a, b, start = (x.double().numpy() for x in cases(48, 3, 5)[name])
    found = emulated(a, b, start, rule)
    wanted = [[one(a[i].tolist(), b[:, j].tolist(), start[i, j].item(), rule) for j in range(5)] for i in range(3)]
    assert found.tolist() == wanted


def test_what_zeros_destroy() -> None:
    """A small number to which 0 x 2^59 is added."""
    a, b, start = (x.double().numpy() for x in cases(16, 4)["of 0 and 2^59"])
    assert (emulated(a, b, start, HOPPER) != start).mean() > 0.9
    assert (emulated(a, b * 0, start, HOPPER) == start).all()


def test_whose_rule_it_is() -> None:
    assert [rule_of(of).name for of in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [*2 * ["tc24"], *3 * ["tc25"]]


def test_the_sum_is_cut_and_not_rounded() -> None:
    """Which shows after a few thousand inputs."""
    a = np.full((1, 4096), 1.0 + 2.0**-7)
    found, exact = emulated(a, a.T, np.zeros((1, 1)), HOPPER).item(), float((a * a).sum())
    assert found < exact
