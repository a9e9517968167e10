"""The noise is Philox, whoever draws it and however much of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.noise import gumbel, most_gumbel, words

WORD = 2**64 - 1


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (second >> 64) ^ b ^ k, second & WORD, (first >> 64) ^ d ^ m, first & WORD
        k, m = (k + 0x9E3779B97F4A7C15) & WORD, (m + 0xBB67AE8584CAA73B) & WORD
    return a, b, c, d


# Known-answer vectors of the Random123 library: counter, key, result.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (WORD, WORD, WORD, WORD),
        (WORD, WORD),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_the_reference_is_philox(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, int, int, int]
) -> None:
    assert philox4x64(counter, key) == want


@examples(25)
@given(
    seed=st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1)),
    sample=st.integers(0, 1000),
    position=st.one_of(st.integers(0, 3), st.integers(0, 2**40)),
    vocabulary=st.integers(1, 37),
)
def test_noise_is_the_counter_based_stream(seed: int, sample: int, position: int, vocabulary: int) -> None:
    """Entry j at position t: word j % 4 of the block with counter (j // 4, t, 0, 0) and key (seed, sample)."""
    noise = gumbel(words(seed, sample, position, vocabulary))
    assert noise.dtype == np.float64
    assert noise.shape == (vocabulary,)
    for j in range(vocabulary):
        word = philox4x64((j // 4, position, 0, 0), (seed, sample))[j % 4]
        assert noise[j] == pytest.approx(-math.log(-math.log(((word >> 11) + 0.5) * 2.0**-53)), rel=1e-12, abs=1e-12)


@examples(40)
@given(st.sets(st.integers(0, 90_000), min_size=1, max_size=30), st.integers(0, 3), st.integers(0, 2**40))
def test_some_words_are_those_of_all(ids: set[int], seed: int, position: int) -> None:
    """Few of many are stepped to, many are drawn with all before them: the words are the same."""
    some = np.array(sorted(ids))
    assert np.array_equal(words(seed, 1, position, some), words(seed, 1, position, 90_001)[some])


def test_noise_is_finite_at_the_ends() -> None:
    """The smallest and the largest words still give finite noise."""
    assert np.isfinite(gumbel(np.array([0, WORD], dtype=np.uint64))).all()


ENDS = [0, 1, 2**11, 2**32 - 1, 2**32, 2**63, WORD - 2**33, WORD - 2**32, WORD - 2**32 + 1, WORD - 2**11, WORD]


@examples(80)
@given(st.lists(st.one_of(st.integers(0, WORD), st.sampled_from(ENDS)), min_size=1, max_size=50))
def test_the_bound_holds(drawn: list[int]) -> None:
    some = np.array(drawn, dtype=np.uint64)
    assert (gumbel(some) <= most_gumbel(some) + 1e-5).all()


def test_the_bound_is_close_where_it_matters() -> None:
    """Large noise is hardly below its bound, so that few entries pass for the best."""
    drawn = words(7, 0, 3, 200_000)
    noise = gumbel(drawn)
    high = noise > 3
    assert (most_gumbel(drawn)[high] - noise[high]).max() < 0.03


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean is Euler's constant, variance pi squared over six, and a sixth part of the draws lies where it should."""
    noise = gumbel(words(7, 0, 3, 200_000))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < x).mean() == pytest.approx(math.exp(-math.exp(-x)), abs=0.005)
