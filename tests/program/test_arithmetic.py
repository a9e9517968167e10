"""Numbers that are rounded, and orders in which they are added, by hand."""

from __future__ import annotations

import math

import torch

from detgen.program.arithmetic import pair_linear
from detgen.program.storage import SMALLEST, bf16


def test_numbers_of_bf16() -> None:
    """The nearest, of ties the even one; what is below 2^-55 then is 0, without a sign, and NaN and inf stay."""
    ulp = 2.0**-7
    found = {
        **{1 + ulp / 2: 1.0, 1 + ulp * 1.5: 1 + 2 * ulp, -1 - ulp * 0.51: -1 - ulp},
        **{SMALLEST: SMALLEST, -SMALLEST: -SMALLEST, SMALLEST * (1 - ulp / 4): SMALLEST},
        **{SMALLEST * (1 - ulp / 2): 0.0, -SMALLEST * (1 - ulp / 3): 0.0, -1e-40: 0.0},
        **{3.4e38: math.inf, -math.inf: -math.inf},
    }
    numbers = torch.tensor(list(found))
    assert bf16(numbers).tolist() == list(found.values())
    assert not bf16(numbers[bf16(numbers) == 0]).signbit().any()
    assert not bf16(torch.tensor([-0.0])).signbit().any()
    assert bf16(torch.tensor([math.nan])).isnan().all()


def test_the_odd_input_of_a_pair_comes_first() -> None:
    """2^24 + 1 is 2^24, to which nothing is left of the first 1, but of the one behind -2^24."""
    x, ones = torch.tensor([[1.0, 2.0**24, 1.0, -(2.0**24)]]), torch.ones(4, 1)
    assert pair_linear(x, ones).item() == 1
    assert pair_linear(x[:, [1, 0, 3, 2]], ones).item() == 0
