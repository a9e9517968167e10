"""What rounds cost, as far as their passes go."""

from __future__ import annotations

import pytest

from detgen.drafters.costs import Costs
from detgen.kernels.pass_cost import PassCost


def line(fixed: float, row: float) -> PassCost:
    cost = PassCost()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        cost.update(rows, fixed + row * rows)
    return cost


def test_rows_beyond_a_pass_take_another_one() -> None:
    costs = Costs(line(0.05, 0.001), most_rows=16)
    assert costs.seconds(16, 1, 100) == pytest.approx(0.066, rel=0.01)
    assert costs.seconds(17, 1, 100) == pytest.approx(0.117, rel=0.01)


def test_a_window_is_not_divided() -> None:
    """Of windows of 6 rows, 2 have room in a pass of 16."""
    costs = Costs(line(0.05, 0.0), most_rows=16)
    assert costs.seconds(12, 6, 100) == pytest.approx(0.05, rel=0.01)
    assert costs.seconds(16, 6, 100) == pytest.approx(0.1, rel=0.01)


def test_a_token_alone_and_one_more_row() -> None:
    costs = Costs(line(0.05, 0.001), most_rows=128)
    assert costs.alone(10, 1000) == pytest.approx(0.006, rel=0.01)
    assert costs.row == pytest.approx(0.001, rel=0.01)
