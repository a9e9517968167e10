"""Ties: every token that a rounding error can bring about is one, also across the boundaries of filters."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.sampling import Choice, choose, scores
from detgen.verify.replay.reading import rounding_explains

CHOICES = st.builds(
    Choice,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    top_k=st.sampled_from([0, 1, 3, 8, 40]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 1000),
)


def chosen(logits: torch.Tensor, choice: Choice) -> int:
    return int(choose(logits.float()[None], [choice]).tokens[0])


@examples(300)
@given(CHOICES, st.integers(0, 10**6), st.sampled_from([1e-3, 0.1, 1.0]))
def test_whatever_an_error_brings_about_is_explained(choice: Choice, seed: int, error: float) -> None:
    """Logits a little off: the token that they give, filtered or not."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(24, generator=g, dtype=torch.float64) * 2).float()
    for _ in range(8):
        shift = (torch.rand(24, generator=g, dtype=torch.float64) - 0.5) * error
        token = chosen(logits.double() + shift, choice)
        assert rounding_explains(logits, choice, token, error * 1.001)


@examples(100)
@given(CHOICES, st.integers(0, 10**6))
def test_no_error_explains_only_the_choice(choice: Choice, seed: int) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 2
    explained = [t for t in range(24) if rounding_explains(logits, choice, t, 1e-12)]
    assert explained == [chosen(logits, choice)]


@examples(100)
@given(CHOICES, st.integers(0, 10**6), st.sampled_from([1e-3, 0.1, 1.0]))
def test_a_token_clearly_outside_is_not_explained(choice: Choice, seed: int, error: float) -> None:
    """Without filters its lag alone tells; with one, so does a place that no error can bring over the boundary."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 2
    plain = Choice(temperature=choice.temperature, seed=choice.seed)
    score = scores(logits, plain)
    lag = (score.max() - score) * (choice.temperature or 1)
    behind = logits.max() - logits
    for token in range(24):
        if abs(lag[token] - error) > 1e-6:
            assert rounding_explains(logits, plain, token, error) == bool(lag[token] < error)
        outside = [
            choice.top_k and (logits > logits[token] + error + 1e-6).sum() >= choice.top_k,
            choice.min_p and behind[token] > -math.log(choice.min_p) * choice.temperature + error + 1e-6,
        ]
        if choice.temperature and any(outside):
            assert not rounding_explains(logits, choice, token, error)


# Logits, filter, the token behind the boundary, and by how much it is behind.
BOUNDARIES = {
    "top_k": ([3.0, 1.0, 0.99, -5.0], {"top_k": 2}, 2, 0.01),
    "top_p": ([2.0, 1.0, 0.0, -9.0], {"top_p": 0.6646}, 1, 0.003),
    "top_p, far behind": ([5.0, -0.7, -9.0, -9.5], {"top_p": 0.9}, 1, 3.5),
    "min_p": ([2.0, 0.0, -0.31, -9.0], {"min_p": 0.1}, 2, 0.0075),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_token_behind_a_boundary(name: str) -> None:
    """It is no choice; a small error that reaches the boundary explains it, a smaller one does not."""
    values, filters, token, behind = BOUNDARIES[name]
    logits = torch.tensor(values)
    for seed in range(200):  # noise under which it would be chosen if it were kept
        choice = Choice(temperature=1.0, seed=seed, **filters)  # type: ignore[arg-type]
        if chosen(logits, Choice(temperature=1.0, seed=seed)) == token:
            break
    assert chosen(logits, choice) != token
    assert not rounding_explains(logits, choice, token, behind / 2)
    assert rounding_explains(logits, choice, token, behind * 2)
