"""How tensor cores add up products: what is computed is what exact fractions give by the words of docs/numerics.md."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.program.arithmetic import core_linear, pair_linear
from detgen.program.storage import RULES, Rule, Storage
from detgen.program.tensor_cores import added

KINDS = "random", "of many magnitudes", "that cancel", "that are subnormal", "of 0 and 2^59", "too large"
rules = pytest.mark.parametrize("rule", RULES.values(), ids=[storage.name for storage in RULES])


def exponent(x: float) -> int:
    return max(math.frexp(x)[1] - 1, -126) if x else -126


def cut(x: Fraction, at: int) -> Fraction:
    """x toward zero, to a multiple of 2^at."""
    unit = Fraction(2) ** at
    return math.trunc(x / unit) * unit


def one(a: list[float], b: list[float], start: float, rule: Rule) -> float:
    """An entry of a product, of finite numbers."""
    total = Fraction(start)
    for first in range(0, len(a), rule.inputs):
        pairs = list(zip(a, b, strict=True))[first : first + rule.inputs]
        top = max(exponent(float(total)), *(exponent(x) + exponent(y) for x, y in pairs))
        exact = sum(
            (cut(x, top - rule.bits) for x in (total, *(Fraction(x) * Fraction(y) for x, y in pairs))), Fraction()
        )
        # 24 bits, or as many as float32 has there.
        total = cut(exact, max(math.frexp(float(exact))[1] - 24, -149)) if exact else Fraction()
        if abs(total) >= 2**128:
            return math.copysign(math.inf, total)
    return float(total)


def drawn(kind: str, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of bf16, [3, inputs] and [inputs, 5], and float32 to add to, [3, 5], all in float32."""
    g = torch.Generator().manual_seed(seed)

    def numbers(*size: int, spread: float = 0.0) -> torch.Tensor:
        return torch.randn(size, generator=g) * torch.exp2((torch.rand(size, generator=g) * 2 - 1) * spread)

    spread = 40 if kind == "of many magnitudes" else 0
    a, b, start = numbers(3, inputs, spread=spread), numbers(inputs, 5, spread=spread), numbers(3, 5, spread=spread)
    if kind == "that cancel":
        a[:, 1::2], b[1::2], start = -a[:, : inputs - 1 : 2], b[: inputs - 1 : 2], start * 2.0**-20
    elif kind == "that are subnormal":
        a, b, start = a * 2.0**-64, b * 2.0**-68, start * 2.0**-130
    elif kind == "of 0 and 2^59":
        a[:, ::3], b[3], start = 0, 2.0**59, start * 2.0**-90
    elif kind == "too large":
        a, b = a * 2.0**64, b * 2.0**61
    return a.bfloat16().float(), b.bfloat16().float(), start


@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    inputs=st.integers(4, 40),
    seed=st.integers(0, 999),
    rule=st.sampled_from([*RULES.values()]),
)
def test_it_is_what_the_words_say(kind: str, inputs: int, seed: int, rule: Rule) -> None:
    a, b, start = drawn(kind, inputs, seed)
    found = added(a, b, start, rule)
    wanted = [[one(a[i].tolist(), b[:, j].tolist(), start[i, j].item(), rule) for j in range(5)] for i in range(3)]
    assert found.tolist() == wanted
    assert not found[found == 0].signbit().any()


@rules
def test_what_zeros_destroy(rule: Rule) -> None:
    """A small number to which 0 x 2^59 is added; 0 x 0 leaves it, and so does 0 x 2^26 of any that may be there."""
    start = torch.tensor([[2.0**-124 * 3]])
    zeros, large = torch.zeros(1, 16), torch.zeros(16, 1)
    assert added(zeros, large, start, rule).equal(start)
    large[3] = 2.0**26
    assert added(zeros, large, start, rule).equal(start)
    large[3] = 2.0**59
    assert added(zeros, large, start, rule).item() == 0


@rules
def test_what_is_not_finite(rule: Rule) -> None:
    """It is what IEEE 754 says of exact products; a sum is infinite from 2^128 on, whatever its products are."""
    ones, none = torch.ones(16, 1), torch.zeros(1, 1)

    def of(**entries: float) -> float:
        x, weight = torch.zeros(1, 16), ones.clone()
        for name, value in entries.items():
            (x[0] if name[0] == "x" else weight[:, 0])[int(name[1:])] = value
        return added(x, weight, none, rule).item()

    inf, large = math.inf, 2.0**100
    assert of(x2=inf, x15=1) == inf
    assert of(x2=1, w2=-inf) == -inf
    assert all(math.isnan(x) for x in (of(x2=inf, x3=-inf), of(w3=inf), of(x4=math.nan), of(w4=math.nan)))
    assert of(x0=large, w0=large) == inf
    assert of(x0=large, w0=large, x1=-large, w1=large) == 0
    assert of(x0=2.0**127, w0=1.9921875) == 2.0**127 * 1.9921875


def test_blocks_of_a_rule() -> None:
    """Ones beside 2^25: of 15, what 24 bits of a sum hold; of eight in a block before it, these, and no one behind."""
    x, ones = torch.ones(1, 16), torch.ones(16, 1)
    x[0, 8] = 2.0**25
    assert [added(x, ones, torch.zeros(1, 1), rule).item() - 2**25 for rule in RULES.values()] == [12, 8]


@rules
def test_parts_take_the_bias_of_cutting_away(rule: Rule) -> None:
    """At 4,096 inputs a sum is as near as that of fused multiply-adds; in one part it would be below by far more."""
    g = torch.Generator().manual_seed(1)
    x, weight = torch.rand(4, 4096, generator=g).bfloat16().float(), torch.rand(4096, 8, generator=g).bfloat16().float()
    exact = x.double() @ weight.double()

    def error(found: torch.Tensor) -> float:
        return float(((found.double() - exact) / exact).pow(2).mean().sqrt())

    in_parts = error(core_linear(x, weight, rule))
    assert in_parts < 2.5e-7
    assert in_parts < 4 * error(pair_linear(x, weight))
    assert error(added(x, weight, torch.zeros(()), rule)) > 2e-6


def test_storages_of_rules() -> None:
    assert all(storage.paired and storage.rounds and not storage.whole for storage in RULES)
    assert not Storage.BYTE.paired
