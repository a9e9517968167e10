"""What is known of how often tokens are accepted."""

from __future__ import annotations

import pytest

from detgen.drafters.rate import Rate, expected_accepted


def test_it_moves_from_the_prior_to_what_is_seen() -> None:
    rate = Rate(0.5)
    assert rate.value == 0.5
    for _ in range(400):
        rate.learn(9, 10)
    assert rate.value == pytest.approx(0.9, abs=0.01)
    rate.learn(0, 10)
    assert rate.value > 0.85


def test_in_doubt_a_few_tokens_decide() -> None:
    """What is known keeps its value, and little of its weight."""
    rate = Rate(0.5)
    rate.learn(900, 1000)
    before = rate.value
    rate.doubt()
    assert rate.value == pytest.approx(before)
    rate.learn(0, 18)
    assert rate.value < 0.3


def test_no_choice_is_closed() -> None:
    never, always = Rate(0.0), Rate(1.0)
    assert 0 < never.value < always.value < 1


def test_expected_accepted() -> None:
    assert expected_accepted(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert expected_accepted(0.5, 0) == 0
