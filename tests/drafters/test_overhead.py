"""What a round takes beside its passes."""

from __future__ import annotations

import pytest

from detgen.drafters.overhead import Overhead


def test_the_first_rounds_count_alike() -> None:
    overhead = Overhead()
    assert overhead.seconds == 0
    overhead.learn(5e-4)
    overhead.learn(7e-4)
    assert overhead.seconds == pytest.approx(6e-4)


def test_it_follows_a_change_and_takes_no_part_in_a_pause() -> None:
    overhead = Overhead()
    for _ in range(100):
        overhead.learn(1e-4)
    overhead.learn(60.0)
    assert overhead.seconds < 4e-4
    for _ in range(100):
        overhead.learn(3e-4)
    assert overhead.seconds == pytest.approx(3e-4, rel=0.01)


def test_what_another_one_knows_counts_like_one_round() -> None:
    first, second = Overhead(), Overhead()
    for _ in range(100):
        first.learn(4e-4)
    second.become(first)
    assert second.seconds == first.seconds
    second.learn(2e-4)
    assert second.seconds == pytest.approx(3e-4)


def test_doubts_add_up() -> None:
    overhead = Overhead()
    overhead.learn(4e-4)
    for _ in range(50):
        overhead.doubt()
    assert overhead.seconds < 1e-4
