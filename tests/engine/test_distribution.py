"""What is sampled follows the target's distribution, whoever drafts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine_inputs import adversary
from helpers.examples import usual

from detgen import Engine, Request, SamplingParams

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "draft_tokens": 2},
    "model": {"drafter": "model", "draft_tokens": 2},
    "adversary": {"drafter": adversary, "draft_tokens": 2},
    "auto": {"drafter": "auto"},
}
EACH = pytest.mark.parametrize("drafter", usual(["model"], DRAFTERS))
SAMPLES = 800
PROMPT = "for i in range(10):\n    for i in range("


def fits(counts: Counter[Any], expected: dict[Any, float], n: int) -> None:
    """Chi-square of counts against expected shares at the 0.9999 quantile (Wilson and Hilferty's approximation).

    Categories of fewer than 5 expected are taken together.
    """
    common = {k: n * p for k, p in expected.items() if n * p >= 5}
    rest = n - sum(common.values())
    chi = sum((counts[k] - want) ** 2 / want for k, want in common.items())
    if rest > 1:
        chi += (n - sum(counts[k] for k in common) - rest) ** 2 / rest
    freedom = len(common) - (rest <= 1)
    assert freedom >= 4, "a distribution that tells something"
    critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi < critical, (chi, critical, freedom)


@EACH
def test_next_tokens_fit(engines: Callable[..., Engine], observe: Callable[..., Any], drafter: str) -> None:
    """The first token, which the prompt's pass chooses, and the second, which may be drafted, at temperature 1."""
    engine = engines(batch_size=64, **DRAFTERS[drafter])
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=123, n=SAMPLES)
    found = observe(engine, [Request(0, 0, prompt=PROMPT, params=params)])
    assert len(found) == SAMPLES
    logits = {key: torch.cat(one.logits).double() for key, one in found.items()}
    first = torch.softmax(logits[0, 0][0], 0)
    tokens = {key: one.completion.token_ids for key, one in found.items()}
    fits(Counter(t[0] for t in tokens.values()), dict(enumerate(first.tolist())), SAMPLES)

    pairs: dict[tuple[int, int], float] = {}
    for key, t in tokens.items():
        if len(t) > 1 and (t[0], 0) not in pairs:
            second = torch.softmax(logits[key][1], 0)
            pairs.update({(t[0], i): first[t[0]].item() * p for i, p in enumerate(second.tolist())})
    fits(Counter(t[:2] for t in tokens.values()), pairs, SAMPLES)
    drafted = {r.status for one in found.values() for r in one.completion.records}
    assert ("accepted" in drafted) <= (drafter != "none")
    if drafter == "model":
        assert "accepted" in drafted


def kept(row: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that may be chosen; ties go to the lower id."""
    p, order = torch.softmax(row.double() / params.temperature, 0).sort(descending=True, stable=True)
    p = p[: params.top_k or len(p)]
    before = p.cumsum(0) - p
    may = ((before / p.sum() < params.top_p) | (params.top_p == 1)) & (p >= params.min_p * p[0])
    return set(order[: len(p)][may].tolist())


@EACH
def test_never_outside_the_set(engines: Callable[..., Engine], observe: Callable[..., Any], drafter: str) -> None:
    """top_k, top_p, min_p and all together, in one batch: no token is emitted that they exclude, all others may be."""
    engine = engines(batch_size=64, **DRAFTERS[drafter])
    kinds: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ]
    some = [
        Request(i, i, prompt=PROMPT, params=SamplingParams(max_tokens=5, temperature=1.5, seed=i, n=40, **kind))
        for i, kind in enumerate(kinds)
    ]
    found = observe(engine, some)
    for kind in range(len(kinds)):
        firsts: set[int] = set()
        for (i, _), one in found.items():
            if i == kind:
                firsts.add(one.completion.token_ids[0])
                for token, row in zip(one.completion.token_ids, torch.cat(one.logits), strict=True):
                    assert token in kept(row, some[kind].params)
        first_row = torch.cat(found[kind, 0].logits)[0]
        assert len(firsts) > 1 or len(kept(first_row, some[kind].params)) == 1
