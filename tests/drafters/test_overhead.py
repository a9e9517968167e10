"""What a round takes beside its passes."""

from __future__ import annotations

import pytest

from detgen.drafters.overhead import Overhead


def test_it_is_guessed_until_it_is_measured() -> None:
    """From rounds without drafts: more of it for more sequences."""
    overhead = Overhead()
    assert overhead.drafting(4) == 0
    overhead.learn(2e-4, drafting=False)
    assert 2e-4 < overhead.drafting(1) < overhead.drafting(16)
    overhead.learn(5e-4, drafting=True)
    overhead.learn(7e-4, drafting=True)
    assert overhead.drafting(1) == overhead.drafting(16) == pytest.approx(6e-4)


def test_it_follows_a_change_and_takes_no_part_in_a_pause() -> None:
    overhead = Overhead()
    for _ in range(100):
        overhead.learn(1e-4, drafting=True)
    overhead.learn(60.0, drafting=True)
    assert overhead.drafting(1) < 4e-4
    for _ in range(100):
        overhead.learn(3e-4, drafting=True)
    assert overhead.drafting(1) == pytest.approx(3e-4, rel=0.01)


def test_doubts_add_up() -> None:
    overhead = Overhead()
    overhead.learn(4e-4, drafting=True)
    for _ in range(50):
        overhead.doubt()
    assert overhead.drafting(1) < 1e-4
