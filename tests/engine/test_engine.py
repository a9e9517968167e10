"""The engine's API: orders, samples, errors, and engines on the same models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.engine_inputs import PROMPTS, adversary
from helpers.examples import usual

from detgen import Engine, EngineConfig, EngineError, Request, RequestError, SamplingParams
from detgen.engine import engine as module
from detgen.machine import CPU, Device


def test_generate_returns_the_order_of_the_prompts(engines: Callable[..., Engine]) -> None:
    """Whatever finishes first: completions stand in the order of the prompts, and of their samples."""
    engine = engines(drafter="auto", batch_size=3)
    requests = [
        Request(
            9 - i, f"r{i}", prompt=p, params=SamplingParams(max_tokens=3 + 5 * (i % 3), n=1 + i % 2, temperature=1.0)
        )
        for i, p in enumerate(PROMPTS)
    ]
    done = engine.generate(requests)
    assert [(c.request.id, c.sample) for c in done] == [(r.id, s) for r in requests for s in range(r.params.n)]
    assert [c.request for c in engine.generate(requests)] == [c.request for c in done]


def test_generate_takes_texts(engines: Callable[..., Engine]) -> None:
    """Sampling parameters by name; text and tokens go together."""
    engine = engines(drafter="auto", batch_size=3)
    done = engine.generate(PROMPTS[:2], max_tokens=6, temperature=0.5, seed=4)
    for prompt, c in zip(PROMPTS, done, strict=False):
        assert c.request.prompt == prompt
        assert c.request.params == SamplingParams(max_tokens=6, temperature=0.5, seed=4)
        assert c.prompt_tokens == len(engine.tokenizer(prompt).input_ids)
        assert c.text == engine.tokenizer.decode(c.token_ids, skip_special_tokens=True)
        assert c.error is None
        assert len(c.token_ids) == 6 or c.finish_reason == "stop"
    assert engine.generate([]) == []
    with pytest.raises(RequestError, match="temperature"):
        engine.generate(["x"], temperature=-1.0)


def test_some_samples_of_a_request(engines: Callable[..., Engine]) -> None:
    """A request may ask for some of its samples: they are those of the whole, and their logs are, too."""
    engine = engines(drafter="none", batch_size=4)
    whole = Request(0, 0, prompt=PROMPTS[0], params=SamplingParams(n=5, temperature=1.0, max_tokens=8, seed=1))
    done = engine.generate([whole])
    some = engine.generate([replace(whole, only=(1, 4)), replace(whole, only=())])
    assert [c.sample for c in some] == [1, 4]
    assert [(c.token_ids, c.text, c.records) for c in some] == [
        (c.token_ids, c.text, c.records) for c in (done[1], done[4])
    ]


def test_more_samples_than_slots(engines: Callable[..., Engine]) -> None:
    """n samples of one prompt, more than the batch: each its own text, the same as in a larger batch."""
    few, many = engines(drafter="auto", batch_size=3), engines(drafter="none", batch_size=16)
    params = SamplingParams(n=8, temperature=1.0, max_tokens=8, seed=1)
    done = [e.generate([Request(0, 0, prompt="def ", params=params)]) for e in (few, many)]
    assert [c.sample for c in done[0]] == list(range(8))
    assert [c.token_ids for c in done[0]] == [c.token_ids for c in done[1]]
    assert len({c.token_ids for c in done[0]}) > 4


def test_samples_are_made_when_there_is_room(engines: Callable[..., Engine]) -> None:
    """A million samples of one prompt start at once, and take the memory of those that run."""
    engine = engines(drafter="none", batch_size=16)
    params = SamplingParams(n=10**6, temperature=1.0, max_tokens=2, seed=1)
    stream = engine.stream([Request(0, 0, prompt="def ", params=params)])
    done: list[int] = []
    for batch in stream:
        done += [c.sample for c in batch]
        if len(done) > 40:
            break
    stream.close()  # type: ignore[attr-defined]
    assert done == list(range(len(done)))


def test_engines_on_the_same_models(engines: Callable[..., Engine]) -> None:
    """Engines that share models and caches take turns: each its own drafter and packing, all the same output."""
    base = engines(drafter="auto", batch_size=3)
    requests = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=7, n=2, temperature=0.5 * (i % 2)))
        for i, p in enumerate([*PROMPTS[:4], PROMPTS[0] * 9, PROMPTS[0] * 9 + "x"])
    ]
    want = [c.token_ids for c in base.generate(requests)]
    others = [
        base.with_settings(drafter="none", batch_size=1),
        base.with_settings(drafter="model", draft_tokens=2),
        base.with_settings(drafter=adversary, threads=1, draft_tokens=3),
        base.with_settings(prefill_chunk=1, batch_size=16),
        base.with_settings(kv_memory=6 * 64 * base.position_bytes),
        base.with_settings(prefix_cache=False),
    ]
    for engine in [*others, base, *others]:
        assert [c.token_ids for c in engine.generate(requests)] == want
    torch.set_num_threads(2)
    assert others[-1].stats.reused_tokens == 0 < others[0].stats.reused_tokens
    before = others[3].stats.target_passes
    others[3].reset_prefix_cache()
    longest = max(c.prompt_tokens for c in others[3].generate(requests))
    assert others[3].stats.target_passes - before > longest > 20, "a pass for each token of the longest prompt"
    with pytest.raises(EngineError, match="dtype cannot change"):
        base.with_settings(dtype="bfloat16")
    with pytest.raises(EngineError, match="this engine has none"):
        engines(drafter="none", batch_size=16).with_settings(drafter="model")


NAMED = {"auto": [False], "cuda": [True], "cuda:0": [True], "cpu": []}


@pytest.mark.parametrize(
    ("name", "rule"),
    usual(zip(NAMED, itertools.cycle((None, "tc24"))), itertools.product(NAMED, (None, "tc24"))),
)
def test_a_gpu_is_tried_first(demo_models: Any, monkeypatch: pytest.MonkeyPatch, name: str, rule: str | None) -> None:
    """And models run where its trial says; it is told by which rule tensor cores have to add up."""
    monkeypatch.setattr(module, "pick_device", lambda _: Device("cpu" if name == "cpu" else "cuda"))
    asked: list[tuple[bool, str | None]] = []
    monkeypatch.setattr(module, "trusted", lambda *_, named, rule: asked.append((named, rule)) or CPU)
    dtype = "bfloat16" if rule is None else "bfloat16-tc24"
    small = demo_models.draft
    assert Engine(target=small, device=name, drafter="none", dtype=dtype).canonical.device.type == "cpu"
    assert asked == [(each, rule) for each in NAMED[name]]


def test_engine_errors(demo_models: Any) -> None:
    """What cannot be built is refused with the option to change."""
    with pytest.raises(EngineError, match=r"--kv-memory 1000 bytes .* at least \d+ bytes"):
        Engine(kv_memory=1000, drafter="none")
    with pytest.raises(EngineError, match="no device named"):
        Engine(device="abacus")
    with pytest.raises(EngineError, match="drafter must be one of"):
        Engine(drafter="oracle")
    with pytest.raises(EngineError, match="batch_size"):
        Engine(batch_size=0)
    with pytest.raises(EngineError, match="threads must be at most 1024, got 100000"):
        Engine(threads=100_000)
    for name in ("batch_size", "draft_tokens", "prefill_chunk", "kv_memory"):
        with pytest.raises(EngineError, match=rf"{name} must be at most \d+, got 1{'0' * 30}$"):
            EngineConfig(**{name: 10**30})
        with pytest.raises(EngineError, match=f"{name} must be a whole number of at least 1, got True"):
            EngineConfig(**{name: True})
    with pytest.raises(EngineError, match="prefix_cache must be True or False, got 'off'"):
        EngineConfig(prefix_cache="off")  # type: ignore[arg-type]
    for ahead in ("on", 0, True, 2.0, None):
        with pytest.raises(EngineError, match=r"speculative_prefill must be auto, off or a whole number of at least 1"):
            EngineConfig(speculative_prefill=ahead)  # type: ignore[arg-type]
    assert EngineConfig(batch_size=1_000_000).batch_size == 1_000_000
    with pytest.raises(EngineError, match="batch_size must be at most 1000000, got 1000001"):
        EngineConfig(batch_size=1_000_001)
    with pytest.raises(EngineError, match="--drafter model needs a draft model"):
        Engine(target=demo_models.target, drafter="model")


def test_batches_larger_than_a_pass() -> None:
    """The draft model takes any number of rows at a time; canonical passes are divided."""
    large = Engine(batch_size=530, kv_memory=512 << 20)
    requests = [
        Request(i, i, prompt="def f", params=SamplingParams(max_tokens=3, deterministic=i % 3 > 0)) for i in range(540)
    ]
    for drafter in ("none", "model"):
        engine = large.with_settings(drafter=drafter)
        done = engine.generate(requests)
        assert len(done) == 540
        assert {c.error for c in done} == {None}
        assert engine.stats.peak_live > 512
