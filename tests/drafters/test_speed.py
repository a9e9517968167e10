"""How fast rounds of a kind are."""

from __future__ import annotations

import pytest

from detgen.drafters.speed import Speed


def test_it_is_what_was_expected_by_what_it_took() -> None:
    speed = Speed(0.9)
    assert speed.value == 0
    speed.learn(4, 2.0, 1.0)
    assert speed.value == 0.5
    assert speed.rounds == 1


def test_earlier_rounds_fade_and_a_pause_says_little() -> None:
    speed = Speed(0.9)
    for _ in range(50):
        speed.learn(4, 1.0, 1.0)
    speed.learn(4, 60.0, 1.0)
    assert speed.value > 0.7
    for _ in range(50):
        speed.learn(4, 1.0, 2.0)
    assert speed.value == pytest.approx(2.0, rel=0.01)


def test_doubts_bring_it_to_what_was_expected_and_no_further() -> None:
    slow, fast = Speed(0.9), Speed(0.9)
    slow.learn(1, 2.0, 1.0)
    fast.learn(1, 1.0, 2.0)
    for _ in range(200):
        slow.doubt(0.03)
        fast.doubt(0.03)
    assert slow.value == pytest.approx(1.0, rel=0.01)
    assert fast.value == 2.0


def test_one_becomes_another() -> None:
    first, second = Speed(0.9), Speed(0.9)
    first.learn(3, 1.0, 2.0)
    second.become(first)
    second.learn(3, 1.0, 0.5)
    assert first.value == 2.0
    assert second.value < 2.0
