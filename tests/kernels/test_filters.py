"""What top_p keeps, by shares that are whole numbers: as docs/numerics.md says, the same in every build of C."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels import choosing
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.filters import kept, sample_plain, scaled, shares
from detgen.kernels.sampling import Choice, choose
from detgen.program.arrays import same_bits

NEARLY_ALL = math.nextafter(1.0, 0.0)


def chosen(logits: np.ndarray, choices: list[Choice]) -> list[tuple[int, float]]:
    """Tokens and leads, which are the same by every build."""
    found = []
    for name in BUILDS:
        if (one := build(name)) is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(choosing, "best_build", lambda one=one: one)
                found.append(choose(logits, choices))
    assert all(same_bits(found[0].tokens, other.tokens) for other in found)
    assert all(found[0].leads.tobytes() == other.leads.tobytes() for other in found)
    return list(zip(found[0].tokens.tolist(), found[0].leads.tolist(), strict=True))


def plainly(row: np.ndarray, choice: Choice) -> set[int]:
    """The same in whole numbers of Python, entry after entry."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: choice.top_k or len(row)]
    share = shares(row, row.max(), choice.temperature).tolist()
    total, before, found = sum(share[i] for i in order), 0, set()
    for i in order:
        if choice.top_p < 1 and before >= max(math.ceil(choice.top_p * float(total)), 1):
            break
        before += share[i]
        found.add(i)
    least = math.log(choice.min_p) if choice.min_p else -math.inf
    return {i for i in found if scaled(row[i : i + 1], row.max(), choice.temperature)[0] >= least}


def row_of(seed: int, width: int, spread: float, whole: bool, special: float | None) -> np.ndarray:
    g = np.random.default_rng(seed)
    row = (spread * g.standard_normal(width)).astype(np.float32)
    row = row.round() if whole else row
    if special is not None:
        row[g.random(width) < 0.3] = special
        row[g.integers(width)] = 1
    return row


ROWS = st.builds(
    row_of,
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 65, 300, 1500]),
    st.sampled_from([0.0, 1e-3, 1.0, 5.0, 40.0, 1e4]),
    st.booleans(),
    st.sampled_from([None, -np.inf, -3.4e38, 0.0, -0.0, 1e-42]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Choice]:
    """A row, and a choice whose top_p is often what some entries have together, or next to it."""
    row = draw(ROWS)
    temperature = draw(st.sampled_from([1e-4, 0.05, 0.8, 1.0, 3.0, 1e4]))
    top_k = draw(st.sampled_from([0, 0, 1, 40, len(row)]))
    share = np.sort(shares(row, row.max(), temperature))[::-1][: top_k or len(row)]
    sums = np.cumsum(share)
    on_sum = float(sums[draw(st.integers(0, len(sums) - 1))]) / float(sums[-1])
    top_p = draw(
        st.sampled_from([on_sum, math.nextafter(on_sum, 0), math.nextafter(on_sum, 2), 0.9, 5e-324, NEARLY_ALL])
    )
    choice = Choice(
        temperature, min(top_p, 1.0), top_k, draw(st.sampled_from([0.0, 0.0, 0.0123])), draw(st.integers(0, 99))
    )
    return row, choice


@examples(150)
@given(case=cases(), seed=st.integers(0, 99))
def test_what_is_kept(case: tuple[np.ndarray, Choice], seed: int) -> None:
    """The shortest run of the best entries that has top_p of all; in another order of the row, the same logits."""
    row, choice = case
    found = kept(row, choice)
    assert set(found.tolist()) == plainly(row, choice)
    turned = np.random.default_rng(seed).permutation(row)
    assert np.sort(turned[kept(turned, choice)]).tolist() == np.sort(row[found]).tolist()


@examples(60)
@given(case=cases(), neighbour=cases())
def test_c_keeps_the_same(case: tuple[np.ndarray, Choice], neighbour: tuple[np.ndarray, Choice]) -> None:
    """Many draws of a row are those of the reference, alone and beside another row; one behind the cut would show."""
    row, choice = case
    choices = [replace(choice, position=i) for i in range(20)]
    found = chosen(np.tile(row, (20, 1)), choices)
    assert found == [sample_plain(row, one) for one in choices]
    other = np.resize(neighbour[0], len(row))
    assert chosen(np.stack([other, row]), [neighbour[1], choices[0]])[1] == found[0]


@pytest.mark.parametrize("width", [65, 262_144])
def test_a_flat_row_is_cut_where_it_should(width: int) -> None:
    """No sum overflows; the lowest ids are kept."""
    row = np.zeros(width, np.float32)
    for top_p, count in ((5e-324, 1), (0.5, -(-width // 2)), (NEARLY_ALL, width)):
        choices = [Choice(1.0, top_p, position=i) for i in range(4)]
        assert chosen(np.tile(row, (4, 1)), choices) == [sample_plain(row, one) for one in choices]
        assert kept(row, choices[0]).tolist() == list(range(count))


def test_shares() -> None:
    """Whole numbers; so small that it is rounded to 0, an entry is dropped by any top_p below 1."""
    row = np.array([0.0, -1.0, -28.0, -29.0, -100.0, -np.inf, -3.4e38], np.float32)
    share = shares(row, row[0], 1.0)
    assert share[0] == 2**40
    assert np.abs(share - np.exp(row.astype(np.float64)) * 2.0**40).max() <= 2**40 * 2.0**-24
    assert share[2:].tolist() == [1, 0, 0, 0, 0]
    assert kept(row, Choice(1.0, NEARLY_ALL)).tolist() == [0, 1, 2]
    assert kept(row, Choice(1.0)).tolist() == list(range(7))
    assert shares(row[:2], row[0], 1e-310).tolist() == [2**40, 0]
