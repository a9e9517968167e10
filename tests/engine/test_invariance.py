"""The contract on the embedded models: the output of a request is a function of its prompt, parameters and seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_inputs import adversary
from helpers.examples import THOROUGH, examples
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine, Request, SamplingParams

NEW = 12
# Of the embedded vocabulary: 0 ends a text, 199 is a new line, 259 an indent, 272 " =" and 9 ")".
PENALTIES: dict[str, Any] = {
    "min_tokens": 4,
    "stop_token_ids": (272, 9),
    "ignore_eos": True,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.6,
    "presence_penalty": -0.4,
    "logit_bias": {0: 3.0, 272: 1.0, 259: -100.0, 199: 1.5},
}
FORM = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 11, "n": 2},
    {"temperature": 1.3, "min_p": 0.02, "seed": 2**62, "n": 3, "logprobs": 3},
    {"logprobs": 2, "stop": ("\n", "def ")},
    {**PENALTIES, "logprobs": 1, "stop": ("(",)},
    {**PENALTIES, "temperature": 0.8, "seed": 5, "n": 2},
    {"guided_json": FORM, "temperature": 1.0, "seed": 8, "n": 2, "logprobs": 1, "min_tokens": 4},
    {"guided_regex": "[a-z_]{1,4}|[0-9]+", "repetition_penalty": 1.3, "stop": ("9",)},
]


def _pool() -> dict[str, Request]:
    """Prompts of 1 to 300 tokens under each kind of sampling, some sharing a prefix."""
    lines = (Path(__file__).parents[2] / "sample_prompts" / "code.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:5]]
    rng = random.Random(1)
    prompts: list[dict[str, Any]] = [{"prompt": t} for t in texts]
    prompts += [{"prompt": texts[0] + "    "}, {"prompt": texts[1][: len(texts[1]) // 2]}]
    prompts += [{"token_ids": tuple(rng.randrange(1, 4096) for _ in range(n))} for n in (1, 2, 33, 65, 130, 300)]
    pool = {}
    for i, prompt in enumerate(prompts):
        for j, kind in enumerate(SAMPLING):
            pool[f"{i}-{j}"] = Request(i, f"{i}-{j}", params=SamplingParams(max_tokens=NEW - i % 3, **kind), **prompt)
    return pool


POOL = _pool()


@pytest.fixture(scope="module")
def reference(engines: Callable[..., Engine], observe: Callable[..., Any]) -> Callable[[str], Any]:
    """A request's samples without drafts and neighbours, on models prepared on their own, on first use."""
    found: dict[str, Any] = {}
    engine = engines(drafter="none", batch_size=1)
    other = Request(0, "other", token_ids=(4095,), params=SamplingParams(max_tokens=1))

    def of(name: str) -> Any:
        if name not in found:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            observe(engine, [other])  # takes the slot, so that no prompt is shared with the request before
            found[name] = observe(engine, [POOL[name]])
            torch.set_num_threads(threads)
        return found[name]

    return of


LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16, 19])
DRAFTERS = st.one_of(
    st.fixed_dictionaries({"drafter": st.just("none")}),
    st.fixed_dictionaries({"drafter": st.sampled_from(["model", "self", "ngram", "auto"]), "draft_tokens": LENGTHS}),
    st.fixed_dictionaries({"drafter": st.just(adversary), "draft_tokens": LENGTHS}),
    st.just({"drafter": "auto"}),
)


@examples(16)
@given(
    drafter=DRAFTERS,
    batch=st.integers(1, 16),
    threads=st.sampled_from([1, 2]),
    names=st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=14, unique=True),
    unverified=st.lists(st.sampled_from(sorted(POOL)), max_size=3, unique=True),
    place=st.integers(0, 14),
)
def test_nothing_but_the_request_matters(
    engines: Callable[..., Engine],
    observe: Callable[..., Any],
    reference: Callable[[str], Any],
    drafter: dict[str, Any],
    batch: int,
    threads: int,
    names: list[str],
    unverified: list[str],
    place: int,
) -> None:
    """Batch size, order, neighbours, unverified requests, drafter, lengths and threads leave every bit as it is."""
    engine = engines(batch_size=batch, **drafter)
    torch.set_num_threads(threads)
    beside = [POOL[name].with_params(deterministic=False) for name in unverified if name not in names]
    order = [POOL[name] for name in names]
    order[place:place] = beside
    found = observe(engine, order)
    assert len(found) == sum(r.params.n for r in order)
    for name in names:
        for key, one in reference(name).items():
            assert found[key].differs(one) is None, (key, drafter, batch, threads, names, unverified)


def test_many_requests_in_any_order(
    engines: Callable[..., Engine], observe: Callable[..., Any], reference: Callable[[str], Any]
) -> None:
    """Many requests at once, more than slots, forwards and backwards: each as if alone."""
    half = list(POOL)[:: 2 if THOROUGH else 4]
    for engine, order in (
        (engines(drafter="auto", batch_size=16), half),
        (engines(drafter=adversary, draft_tokens=5, batch_size=7), half[::-1]),
    ):
        found = observe(engine, [POOL[name] for name in order])
        for name in order:
            for key, one in reference(name).items():
                assert found[key].differs(one) is None, key


def test_the_seed_decides(engines: Callable[..., Engine]) -> None:
    """Other seeds and other samples give other texts, the same ones the same."""
    engine = engines(drafter="none", batch_size=4)

    def run(seed: int) -> list[str]:
        done = engine.generate(["import "], max_tokens=24, temperature=1.0, seed=seed, n=3)
        return [c.text for c in done]

    one, other = run(1), run(2)
    assert len({*one, *other}) == 6
    assert run(1) == one


def test_unverified_requests_do_generate(engines: Callable[..., Engine]) -> None:
    """Unverified requests finish, and their log says that nobody verified them."""
    engine = engines(drafter=adversary, draft_tokens=5, batch_size=7).with_settings()
    done = engine.generate(["import os", "class A:"], max_tokens=9, deterministic=False)
    assert "adversary" not in engine.stats.drafters
    for c in done:
        assert len(c.token_ids) == len(c.records) <= 9
        assert {(r.drafter, r.status) for r in c.records} == {("none", "unverified")}
        assert [r.token for r in c.records] == list(c.token_ids)
