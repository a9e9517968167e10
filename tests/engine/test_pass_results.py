"""Log-probabilities and margins are those of the canonical logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_inputs import PROMPTS
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine, Request, SamplingParams
from detgen.engine.pass_results import token_logprobs
from detgen.engine.request import TokenLogprobs


def test_logprobs(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """The natural logarithm of the softmax at temperature 1, best first, as many as asked for."""
    engine = engines(drafter="auto", batch_size=3)
    request = Request(0, 0, prompt=PROMPTS[1], params=SamplingParams(max_tokens=6, temperature=0.9, logprobs=4))
    one = observe(engine, [request])[0, 0]
    assert one.completion.logprobs is not None
    for token, row, entry, r in zip(
        one.completion.token_ids,
        torch.log_softmax(torch.cat(one.logits).double(), -1),
        one.completion.logprobs,
        [r for r in one.completion.records if r.token is not None],
        strict=True,
    ):
        assert entry.logprob == r.logprob == pytest.approx(row[token].item(), abs=1e-5)
        values, places = row.topk(4)
        assert [t for t, _ in entry.top] == places.tolist()
        assert [p for _, p in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
    zero = engine.generate([request.with_params(logprobs=0)])[0].logprobs
    assert zero is not None
    assert all(e.top == () for e in zero)
    assert engine.generate([request.with_params(logprobs=None)])[0].logprobs is None


def test_greedy_margins(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """At temperature 0 the margin is the lead over the runner-up's logit."""
    engine = engines(drafter="auto", batch_size=3)
    one = observe(engine, [Request(0, 0, prompt=PROMPTS[1], params=SamplingParams(max_tokens=6))])[0, 0]
    top = torch.cat(one.logits).double().topk(2).values
    want = (top[:, 0] - top[:, 1]).tolist()
    assert [r.margin for r in one.completion.records if r.token is not None] == pytest.approx(want, abs=1e-5)


@examples(60)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3).map(float), min_size=9, max_size=9), min_size=1, max_size=4),
    wanted=st.integers(0, 12),
)
def test_the_most_likely_stand_in_order(rows: list[list[float]], wanted: int) -> None:
    """Of equal ones the lower id first, also where not all of them are wanted."""
    found = token_logprobs(np.array(rows, np.float32), [row[0] for row in rows], wanted)
    for one, row in zip(found, rows, strict=True):
        best = sorted(range(9), key=lambda i: (-row[i], i))[:wanted]
        assert one == TokenLogprobs(row[0], tuple((i, row[i]) for i in best))


def test_impossible_tokens_come_last() -> None:
    (one,) = token_logprobs(np.array([[-math.inf, -1.0, -math.inf, -2.0]]), [-1.0], 3)
    assert one.top == ((1, -1.0), (3, -2.0), (0, -math.inf))


def test_a_broken_row_has_as_many() -> None:
    (one,) = token_logprobs(np.full((1, 5), math.nan), [math.nan], 3)
    assert [token for token, _ in one.top] == [0, 1, 2]
