"""What a pass costs: the line through what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

from detgen.kernels.pass_cost import PassCost


def on_a_line(choice: float = 0.0) -> PassCost:
    """Passes of 10 ms and 2 ms a row, and `choice` seconds a row behind them."""
    cost = PassCost()
    rng = random.Random(0)
    for _ in range(200):
        rows = rng.randint(1, 64)
        cost.update(rows, 0.01 + 0.002 * rows)
        cost.choose(rows, choice * rows)
    return cost


def test_fits_a_line() -> None:
    """Seconds that are a line in the rows are predicted exactly, between and beyond what was seen."""
    cost = on_a_line()
    assert cost.slopes()[0] == pytest.approx(0.002)
    for rows in (1, 10, 128):
        assert cost.predict(rows) == pytest.approx(0.01 + 0.002 * rows)


def test_passes_of_few_rows_do_not_follow_those_of_many() -> None:
    """What a short window costs is known beside a prompt's pass, which has more to compute."""
    cost = PassCost()
    for rows, seconds in [(40, 0.060), *[(1, 0.0127), (9, 0.016)] * 5]:
        cost.update(rows, seconds)
    assert cost.predict(9) == pytest.approx(0.016, rel=0.2)
    assert cost.slopes()[0] < 0.0008


def test_tells_rows_from_area() -> None:
    """Where tiles are wider or narrower than the rows ask for, both get their own share of the cost."""
    cost = PassCost()
    rng = random.Random(0)
    for _ in range(200):
        rows, width = rng.randint(1, 64), rng.randint(1, 9)
        cost.update(rows, 0.01 + 0.002 * rows + 0.0005 * 16 * width, 16 * width)
    assert cost.slopes() == pytest.approx((0.002, 0.0005))
    assert cost.predict(10, 160) == pytest.approx(0.01 + 0.02 + 0.08)


def test_nothing_seen_costs_nothing() -> None:
    """Before the first pass the prediction is 0; after one it is that pass, whatever the rows."""
    cost = PassCost()
    assert cost.predict(10) == 0
    cost.update(8, 0.5)
    assert cost.predict(8) == cost.predict(100) == pytest.approx(0.5)


def test_equal_rows_have_no_slope() -> None:
    """Passes of one row count say nothing of the slope, and rounding must not invent one."""
    cost = PassCost()
    for i in range(100):
        cost.update(33, 0.1 + 1e-3 * (i % 2))
    assert cost.slopes()[0] == 0
    assert cost.predict(64) == pytest.approx(0.1, abs=2e-3)


def test_never_below_zero() -> None:
    """Costs that fall with the rows are taken as flat, and no prediction is negative."""
    cost = PassCost()
    for rows in range(1, 50):
        cost.update(rows, 1.0 / rows)
    assert cost.slopes()[0] == 0
    assert cost.predict(1000) > 0


def test_a_pause_counts_little() -> None:
    """One pass that took a thousand times as long hardly moves the line."""
    cost = PassCost()
    for i in range(100):
        cost.update(1 + i % 16, 0.01)
    cost.update(4, 10.0)
    assert cost.predict(4) < 0.015


def test_follows_a_change() -> None:
    """Old passes fade: a machine that became slower is believed after a while."""
    cost = PassCost()
    for i in range(300):
        cost.update(1 + i % 16, 0.01)
    for i in range(300):
        cost.update(1 + i % 16, 0.015)
    assert cost.predict(8) == pytest.approx(0.015, rel=0.02)


def test_choosing_counts_for_each_row() -> None:
    """What a further row costs is its place in the pass and its choice, unless none is made."""
    cost = on_a_line(choice=0.003)
    assert cost.slopes()[0] == pytest.approx(0.005)
    for rows in (1, 10, 128):
        assert cost.predict(rows) == pytest.approx(0.01 + 0.005 * rows)
        assert cost.predict(rows, chosen=1) == pytest.approx(0.013 + 0.002 * rows)


def test_pauses_beside_slow_choices() -> None:
    """A slow pass is known by passes alone, a slow choice by choices; neither counts for more than twice the usual."""
    cost = PassCost()
    for i in range(100):
        cost.update(1 + i % 16, 0.01)
        cost.choose(1 + i % 16, 0.1 * (1 + i % 16))
    before = cost.predict(4)
    cost.update(4, 10.0)
    assert cost.predict(4) - before < 0.001
    cost.choose(8, 100.0)
    assert cost.predict(4) < 1.05 * before


def test_the_time_of_a_call_is_shared_as_predicted() -> None:
    """By the rows alone before anything is known; then a pass has a share of its own, whatever its rows."""
    rows, areas = np.array([1, 63]), np.array([16.0, 78.0])
    assert PassCost().shares(rows, areas).tolist() == [1 / 64, 63 / 64]
    found = on_a_line().shares(rows, areas)
    assert found.sum() == pytest.approx(1)
    assert found[0] / found[1] == pytest.approx((0.01 + 0.002) / (0.01 + 0.002 * 63))
