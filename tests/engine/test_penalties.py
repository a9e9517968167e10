"""Requests that adjust their logits: as transformers does, whoever drafts, and with what is reported unadjusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_inputs import code
from helpers.examples import usual
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from detgen import Engine, Request, SamplingParams
from detgen.kernels.penalties import Penalties, reference
from detgen.kernels.sampling import Choice, scores

TEXTS = code(6)
NEW = 24
ALL: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.3,
    "logit_bias": {0: 4.0, 199: -100.0, 259: 1.0},
    "min_tokens": 6,
}


class OpenAIPenalties(LogitsProcessor):
    """Frequency and presence penalty, which transformers does not have."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        for token in set(input_ids[0, self._prompt :].tolist()):
            count = int((input_ids[0, self._prompt :] == token).sum())
            logits[:, token] = logits[:, token] - torch.tensor(self._frequency) * count
            logits[:, token] = logits[:, token] - self._presence
        return logits


@pytest.fixture(scope="module")
def model(demo_models: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_models.target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines(drafter="auto", batch_size=5)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[tuple[int, ...]]:
    """What the texts give where nothing is adjusted."""
    return [c.token_ids for c in engine.generate(TEXTS, max_tokens=NEW)]


def by_transformers(model: Any, prompt: list[int], asked: dict[str, Any]) -> list[int]:
    """The tokens of `generate`, which applies biases, the penalty for repetition and the least length in this order."""
    known: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    for ours, theirs in (("repetition_penalty", "repetition_penalty"), ("min_tokens", "min_new_tokens")):
        if ours in asked:
            known[theirs] = asked[ours]
    if "logit_bias" in asked:
        known["sequence_bias"] = [[[token], float(bias)] for token, bias in asked["logit_bias"].items()]
    if asked.get("ignore_eos"):
        known["eos_token_id"] = None
    if "stop_token_ids" in asked:
        known["eos_token_id"] = [0, *asked["stop_token_ids"]]
    own = OpenAIPenalties(len(prompt), asked.get("frequency_penalty", 0.0), asked.get("presence_penalty", 0.0))
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([own]), **known
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "asked",
    usual(
        [
            {"repetition_penalty": 0.9},
            {"stop_token_ids": (272, 9), "min_tokens": 8},
            ALL,
        ],
        [
            {"presence_penalty": -1.5, "frequency_penalty": 0.4},
            {"logit_bias": {0: 30}, "ignore_eos": True},
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.8},
            {"presence_penalty": 1.5},
            {"logit_bias": {199: -100, 259: 2.5, 0: 3}},
            {"logit_bias": {0: 30}, "min_tokens": 7},
            {"stop_token_ids": (272, 9)},
        ],
    ),
    ids=lambda asked: " ".join(asked),
)
def test_as_in_transformers(model: Any, engine: Engine, plain: list[tuple[int, ...]], asked: dict[str, Any]) -> None:
    """Token ids of greedy requests, several at a time and drafted for; one may differ from a near-tie on."""
    some = usual(TEXTS[:4], TEXTS[4:])
    done = engine.generate(some, max_tokens=NEW, **asked)
    assert [c.token_ids for c in done] != plain[: len(some)]
    theirs = [by_transformers(model, engine.encode(c.request), asked) for c in done]
    assert sum(list(c.token_ids) == tokens for c, tokens in zip(done, theirs, strict=True)) >= len(some) - 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_reported(engines: Callable[..., Engine], observe: Callable[..., Any], temperature: float) -> None:
    """Tokens and margins come from adjusted logits; log-probabilities and the trace have the model's own."""
    params = SamplingParams(max_tokens=NEW, logprobs=2, temperature=temperature, seed=4, **ALL)
    request = Request(0, 0, prompt=TEXTS[3], params=params)
    one = observe(engines(drafter="ngram", draft_tokens=4, batch_size=3), [request])[0, 0]
    done, raw = one.completion, torch.cat(one.logits)
    penalties = Penalties.of(params, frozenset({0}))
    prompt = engines(drafter="auto", batch_size=5).encode(request)
    for i, (token, entry, r) in enumerate(
        zip(done.token_ids, done.logprobs, [r for r in done.records if r.token is not None], strict=True)
    ):
        score = scores(
            reference(raw[i].numpy(), penalties, prompt, list(done.token_ids[:i])),
            Choice(temperature=temperature, seed=4, position=i),
        )
        best = np.sort(score)[::-1]
        assert int(score.argmax()) == token
        assert r.margin == pytest.approx(float(best[0] - best[1]), abs=1e-6)
        plain = torch.log_softmax(raw[i].double(), -1)
        assert entry.logprob == r.logprob == pytest.approx(float(plain[token]), abs=1e-5)
        assert [t for t, _ in entry.top] == plain.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_still_accepted(demo_models: Any, temperature: float) -> None:
    """The target as its own draft model is right but for near-ties, since it sees the same penalties."""
    engine = Engine(
        target=demo_models.target, draft=demo_models.target, draft_tokens=4, batch_size=4, kv_memory=64 << 20
    )
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=6, **{**ALL, "min_tokens": 40})
    drafting = engine.with_settings(drafter="model")
    drafting.generate([Request(i, i, prompt=text, params=params) for i, text in enumerate(TEXTS)])
    stats = drafting.stats.drafters["model"]
    assert stats.drafted > 150
    assert stats.accepted >= 0.98 * stats.drafted


def test_unverified_requests_adjust_too(engines: Callable[..., Engine]) -> None:
    """A token that is ruled out does not come, whoever drafts for others."""
    for settings in ({"drafter": "none", "batch_size": 4}, {"drafter": "model", "draft_tokens": 5, "batch_size": 7}):
        engine = engines(**settings)
        plain = engine.generate(TEXTS[:4], max_tokens=NEW, deterministic=False)
        often = plain[0].token_ids[1]
        for c in engine.generate(TEXTS[:4], max_tokens=NEW, deterministic=False, logit_bias={often: -100.0}):
            assert often not in c.token_ids


def test_ids_beyond_the_vocabulary(engine: Engine) -> None:
    """Such a request is refused, and says what the model has."""
    asked: list[dict[str, Any]] = [{"stop_token_ids": (3, 4096)}, {"logit_bias": {4096: 1.0}}, {}]
    bad, biased, good = engine.generate(
        [Request(i, i, prompt="x", params=SamplingParams(max_tokens=2, **one)) for i, one in enumerate(asked)]
    )
    assert bad.error == "stop_token_ids must have ids from 0 to 4095 for this model, got 4096"
    assert biased.error == "logit_bias must have ids from 0 to 4095 for this model, got 4096"
    assert good.error is None
