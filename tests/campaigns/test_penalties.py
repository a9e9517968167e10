"""Random penalties, biases and ends: every bit as without drafts and neighbours, every token as the reference says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine_inputs import code

from detgen import Engine, Request, SamplingParams
from detgen.kernels.penalties import Penalties, reference
from detgen.kernels.sampling import Choice, scores

pytestmark = pytest.mark.slow

TRIES = 300
TEXTS = code(40)
COMMON = (0, 199, 259, 272, 258, 12, 269, 289, 321, 14, 9, 8)  # ends a text; tokens that the texts have often
DRAFTERS: list[dict[str, Any]] = [
    *({"drafter": name, "draft_tokens": n} for name in ("model", "ngram", "auto") for n in (1, 3, 8)),
    *({"drafter": "ngram", "draft_tokens": n} for n in (1, 5, 16)),
    {"drafter": "none"},
]


def drawn(rng: random.Random, index: int) -> Request:
    """A request with any of the parameters, often several."""
    asked: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0.0, 0.0, 0.8, 1.3])}
    asked |= {"seed": rng.randrange(2**63), "n": rng.choice([1, 1, 2]), "logprobs": rng.choice([None, 0, 3])}
    asked["top_k"], asked["ignore_eos"] = rng.choice([0, 0, 30]), rng.random() < 0.5
    some: dict[str, Any] = {
        "min_tokens": rng.randint(0, asked["max_tokens"]),
        "repetition_penalty": rng.choice([0.01, 0.7, 1.1, 1.5, 3.0, 100.0]),
        "frequency_penalty": rng.choice([-2.0, -0.3, 0.4, 2.0]),
        "presence_penalty": rng.choice([-2.0, -0.3, 0.4, 2.0]),
        "logit_bias": {rng.choice([*COMMON, rng.randrange(4096)]): rng.choice([-100, -1.5, 2, 5, 100]) for _ in "abc"},
        "stop_token_ids": rng.sample(COMMON, rng.randint(1, 4)),
        "stop": rng.sample(["\n", "(", "self", "= ", "🎉"], 2),
    }
    asked |= {name: some[name] for name in rng.sample(sorted(some), rng.randint(1, len(some)))}
    return Request(index, index, prompt=rng.choice(TEXTS), params=SamplingParams(**asked))


def unlike_the_reference(engine: Engine, one: Any) -> int:
    """Tokens that are not the best of the scores that the reference makes of the raw logits."""
    done, params = one.completion, one.completion.request.params
    penalties = Penalties.of(params, frozenset({0, *params.stop_token_ids}))
    prompt, wrong = engine.encode(done.request), 0
    for i, (row, token) in enumerate(zip(torch.cat(one.logits), done.token_ids, strict=True)):
        adjusted = reference(row.numpy(), penalties, prompt, list(done.token_ids[:i]))
        choice = Choice(params.temperature, top_k=params.top_k, seed=params.seed, sample=done.sample, position=i)
        wrong += int(scores(adjusted, choice).argmax()) != token
    return wrong


def test_penalties(
    engines: Callable[..., Engine],
    observe: Callable[..., Any],
    tries: Callable[[int], int],
    tally: Callable[..., None],
) -> None:
    alone = engines(drafter="none", batch_size=1)
    counts = {"tries": tries(TRIES), "samples": 0, "tokens": 0, "differing": 0, "wrong tokens": 0}
    for seed in range(counts["tries"]):
        rng = random.Random(seed)
        requests = [drawn(rng, i) for i in range(rng.randint(2, 10))]
        want: dict[Any, Any] = {}
        for request in requests:
            want |= observe(alone, [request])
        engine = engines(batch_size=rng.choice([1, 2, 3, 8, 16]), **rng.choice(DRAFTERS))
        beside = [drawn(rng, 100 + i).with_params(deterministic=False) for i in range(rng.choice([0, 0, 2]))]
        queue = [*requests, *beside]
        rng.shuffle(queue)
        found = observe(engine, queue)
        for key, one in want.items():
            counts["samples"] += 1
            counts["tokens"] += len(one.completion.token_ids)
            counts["differing"] += found[key].differs(one) is not None
            counts["wrong tokens"] += unlike_the_reference(alone, one)
    tally(**counts)
    assert (counts["differing"], counts["wrong tokens"]) == (0, 0)
