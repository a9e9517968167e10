"""What tokens are worth while requests wait, and when the end waits for the last ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detgen.drafters.worth import Worth

SEQUENCES = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=16)


@given(some=SEQUENCES)
def test_all_tokens_count_while_requests_wait(some: list[tuple[int, int]]) -> None:
    assert Worth(None).tokens([gain for _, gain in some]) == sum(gain for _, gain in some)


@given(some=SEQUENCES, same=st.integers(1, 9))
def test_equal_gains_are_worth_their_sum(some: list[tuple[int, int]], same: int) -> None:
    """Whatever is left."""
    assert Worth([left for left, _ in some]).tokens([same] * len(some)) == pytest.approx(same * len(some))


@given(some=SEQUENCES, which=st.integers(0, 15))
def test_it_lies_between_the_least_and_the_greatest_and_more_is_worth_more(
    some: list[tuple[int, int]], which: int
) -> None:
    worth, gains = Worth([left for left, _ in some]), [gain for _, gain in some]
    value = worth.tokens(gains)
    assert min(gains) - 1e-9 <= value / len(gains) <= max(gains) + 1e-9
    gains[which % len(gains)] += 1
    assert worth.tokens(gains) >= value


def test_the_end_waits_for_the_last_one() -> None:
    """What the others get is worth little, the less the further ahead they are."""
    gains = [8, 8, 8, 1]
    assert Worth([100] * 4).tokens(gains) == pytest.approx(4 * 4.867, rel=0.01)
    assert Worth([93, 93, 93, 100]).tokens(gains) == pytest.approx(4 * 2.331, rel=0.01)
    assert Worth([10, 10, 10, 100]).tokens(gains) == pytest.approx(4, rel=0.01)
    assert Worth([10, 10, 10, 100]).tokens([1, 1, 1, 8]) == pytest.approx(32, rel=0.01)
