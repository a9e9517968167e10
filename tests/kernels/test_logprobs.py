"""Log-probabilities and margins of chosen tokens are those of the logits, however they are computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.logprobs import judge_rows, most_likely
from detgen.kernels.penalties import Adjustment
from detgen.kernels.sampling import Choice, choose
from detgen.program import arithmetic


@examples(60)
@given(
    rows=st.integers(1, 20),
    width=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 33, 100, 4096, 4099]),
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0, 40.0]),
    special=st.sampled_from([None, -torch.inf, torch.nan, torch.inf, 3e38]),
    some=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_they_are_those_of_all_logits(
    rows: int, width: int, spread: float, special: float | None, some: bool, seed: int
) -> None:
    """Those of the reference, and the difference of the two largest logits."""
    g = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, width, generator=g)
    if special is not None:
        logits[torch.rand(logits.shape, generator=g) < 0.05] = special
    at = torch.randperm(rows, generator=g)[: 1 + rows // 2].sort().values if some else torch.arange(rows)
    two = torch.cat([logits, torch.full((rows, 1), -torch.inf)], 1)[at].double().topk(2).values
    margins = (two[:, 0] - two[:, 1]).numpy()
    expected = arithmetic.log_softmax(logits)[at]
    own = expected.gather(-1, torch.from_numpy(logits.numpy().argmax(-1))[at, None])[:, 0].numpy()
    for whole in (None, np.arange(len(at)), np.arange(0, len(at), 2)):
        changed = logits.clone()
        picked = choose(changed, None)
        judged = judge_rows(changed, picked, at.numpy() if some else None, whole)
        assert np.array_equal(judged.chosen, own, equal_nan=True)
        assert np.array_equal(judged.margins, margins, equal_nan=True)
        assert (judged.logprobs is None) == (whole is None)
        if judged.logprobs is not None:
            assert np.array_equal(judged.logprobs, expected[whole].numpy()) or expected.isnan().any()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_lead_that_decided_is_the_margin(temperature: float) -> None:
    """Of a row that is sampled or adjusted, the margin is not that of its logits; its log-probability is."""
    logits = torch.tensor([[3.0, 1.0, 0.5, 0.0], [3.0, 1.0, 0.5, 0.0], [3.0, 1.0, 0.5, 0.0]])
    ban = Adjustment(np.array([0]), np.array([[0], [1], [0], [0], [-np.inf]], np.float32))
    choices = [Choice(), Choice(temperature, adjustment=ban), Choice()]
    picked = choose(logits, choices)
    judged = judge_rows(logits.clone(), picked, np.array([0, 1]))
    assert judged.margins[0] == 2.0
    assert judged.margins[1] == picked.leads[1] != 2.0
    token = int(picked.tokens[1])
    assert token != 0
    assert judged.chosen[1] == arithmetic.log_softmax(logits)[1, token]


def test_the_only_candidate_has_an_infinite_margin() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 4] = 1.0
    picked = choose(logits.clone(), [Choice(), Choice(0.8)])
    assert judge_rows(logits.clone(), picked).margins.tolist() == [math.inf, math.inf]


def test_zeros_of_both_signs_are_equal() -> None:
    """The margin of a tie is 0, not -0."""
    logits = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])
    judged = judge_rows(logits.clone(), choose(logits, None))
    assert [math.copysign(1, margin) for margin in judged.margins.tolist()] == [1, 1]


@examples(60)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3).map(float), min_size=9, max_size=9), min_size=1, max_size=4),
    wanted=st.integers(0, 12),
)
def test_the_most_likely_stand_in_order(rows: list[list[float]], wanted: int) -> None:
    """Of equal ones the lower id first, also where not all of them are wanted."""
    for one, row in zip(most_likely(np.array(rows, np.float32), wanted), rows, strict=True):
        best = sorted(range(9), key=lambda i: (-row[i], i))[:wanted]
        assert one.tolist() == [(i, row[i]) for i in best]


def test_impossible_tokens_come_last() -> None:
    (one,) = most_likely(np.array([[-math.inf, -1.0, -math.inf, -2.0]], np.float32), 3)
    assert one.tolist() == [(1, -1.0), (3, -2.0), (0, -math.inf)]


def test_a_broken_row_has_as_many() -> None:
    (one,) = most_likely(np.full((1, 5), math.nan, np.float32), 3)
    assert one["token"].tolist() == [0, 1, 2]
