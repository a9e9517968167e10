"""Log-probabilities and margins are those of the canonical logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine_inputs import PROMPTS

from detgen import Engine, Request, SamplingParams


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
