"""What is kept in the cache: little room changes no bit, what two prompts share is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine_inputs import adversary, ids
from helpers.examples import usual
from helpers.own_forward import decoders

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.drafters.protocol import Draft, Drafter
from detgen.kernels.generic.generic_decoder import GenericDecoder
from detgen.runner.kv_cache import KVCache


def test_chunks_of_prompts(engines: Callable[..., Engine]) -> None:
    """No pass reads more of a prompt than the chunk: a prompt of 50 tokens takes 50 passes of one."""
    settings = {"prefill_chunk": 1, "batch_size": 1, "prefix_cache": False}
    engine = engines(drafter="none", batch_size=16).with_settings(**settings)
    engine.generate([Request(0, 0, token_ids=ids(50), params=SamplingParams(max_tokens=1))])
    assert engine.stats.target_passes == 50


def test_a_small_kv_memory(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """With room for little, requests take turns or are refused, and the bits are those of a roomy engine."""
    roomy = engines(drafter="none", batch_size=1)
    with pytest.raises(EngineError) as refusal:
        Engine(kv_memory=1, drafter="none")
    least = int(str(refusal.value).rsplit("at least ", 1)[1].split()[0])
    some = [
        Request(i, i, token_ids=ids(n, 9 + i), params=SamplingParams(max_tokens=5))
        for i, n in enumerate((3, 90, 200, 40, 8, 600))
    ]
    want = observe(roomy, some)
    for memory in (least, int(least * 1.1)):
        engine = Engine(kv_memory=memory, drafter="none", batch_size=8)
        found = observe(engine, some)
        assert len(found) == len(some)
        for key, one in found.items():
            if one.completion.error is not None:
                assert "--kv-memory" in one.completion.error
                assert one.completion.request.token_ids is not None
                assert len(one.completion.request.token_ids) > 200
            else:
                assert one.differs(want[key]) is None, (key, memory)


def test_samples_share_the_prompt(engines: Callable[..., Engine]) -> None:
    """The prompt of n samples is read once, unverified samples' too."""
    for deterministic in (True, False):
        engine = engines(drafter="none", batch_size=1).with_settings(batch_size=4)  # nothing counted yet
        engine.reset_prefix_cache()
        params = SamplingParams(n=4, max_tokens=4, temperature=1.0, deterministic=deterministic)
        engine.generate([Request(0, 0, token_ids=ids(101), params=params)])
        assert engine.stats.prompt_tokens == 101 + 3
        assert engine.stats.reused_tokens == 3 * 100


def test_a_prefix_is_reused(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """A later prompt with the same beginning does not read it again, and its bits are the same."""
    engine = engines(drafter="ngram", batch_size=3).with_settings(batch_size=1)  # nothing counted yet
    engine.reset_prefix_cache()
    first = Request(0, 0, token_ids=ids(80), params=SamplingParams(max_tokens=6))
    longer = Request(1, 1, token_ids=(*ids(80), 7, 7, 7), params=SamplingParams(max_tokens=6))
    observe(engine, [first])
    before = engine.stats.prompt_tokens
    found = observe(engine, [longer])
    assert engine.stats.prompt_tokens - before == 3
    want = observe(engines(drafter="none", batch_size=16), [longer])
    assert found[1, 0].differs(want[1, 0]) is None


def prompts(*lengths: int, **params: Any) -> list[Request]:
    """Requests of random tokens that go on to their limit."""
    sampling = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
    return [Request(i, i, token_ids=ids(n, 30 + i), params=sampling) for i, n in enumerate(lengths)]


def test_too_little_room_for_the_batch(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """Sequences give their pages back and are read again; every bit is that of a roomy engine."""
    roomy = engines(drafter="none", batch_size=1)
    requests = prompts(60, 57, 120, 50, 62, n=2, temperature=0.7, seed=4)
    want = observe(roomy, requests)
    for drafter in usual(("none", adversary), ("model",)):
        base = engines(drafter="auto", batch_size=4)
        engine = base.with_settings(drafter=drafter, kv_memory=base.position_bytes * 64 * 5)
        engine.reset_prefix_cache()
        found = observe(engine, requests)
        assert engine.stats.preemptions > 0
        for key, one in found.items():
            assert one.differs(want[key]) is None, (drafter, key)


def test_a_drafter_that_returns_too_much(engines: Callable[..., Engine]) -> None:
    """More tokens than were asked for are left out: there may be no pages for them."""
    roomy = engines(drafter="none", batch_size=1)
    requests = prompts(60, 57, 120, 50)
    want = [c.token_ids for c in roomy.generate(requests)]
    texts = [(*(r.token_ids or ()), *tokens, *[7] * 20) for r, tokens in zip(requests, want, strict=True)]

    class Lavish(Drafter):
        name, draft_tokens = "lavish", 8

        def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
            whole = [next(t for t in texts if list(t[:40]) == seq.tokens[:40]) for seq in seqs]
            return [Draft(list(t[len(s.tokens) :][:30]), self.name) for s, t in zip(seqs, whole, strict=True)]

    base = engines(drafter="auto", batch_size=4)
    engine = base.with_settings(drafter=lambda _: Lavish(), kv_memory=base.position_bytes * 64 * 5, prefix_cache=False)
    assert [c.token_ids for c in engine.generate(requests)] == want


def test_an_interruption_while_a_page_is_copied(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be copied is not taken for copied; the engine goes on."""
    engine = engines(drafter="ngram", batch_size=3).with_settings(batch_size=4)
    requests = [
        Request(i, i, token_ids=(*ids(42, 3), *rest), params=SamplingParams(max_tokens=4, logprobs=1))
        for i, rest in enumerate([(7,) * 10, (9,) * 58])
    ]
    engine.reset_prefix_cache()
    want = engine.generate(requests[1])[0]
    engine.reset_prefix_cache()
    engine.generate(prompts(150, 151, 152, 153))  # dirties pages
    engine.reset_prefix_cache()
    engine.generate(requests[0])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests[1])
    found = engine.generate(requests[1])[0]
    assert (found.token_ids, found.logprobs) == (want.token_ids, want.logprobs)


def test_what_is_broken_is_broken_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that overflow at a committed token end the request, whether its row decodes or is read again."""
    with decoders("generic"):
        base = Engine(batch_size=4, kv_memory=32 << 20)
    requests = prompts(60, 57)
    tokens = base.with_settings(drafter="none").generate(requests)[1].token_ids
    bad = tokens[3]
    assert not any(bad in (r.token_ids or ()) for r in requests)
    attend = GenericDecoder._attend

    def broken(self: GenericDecoder, batch: Any, layer: int, q: Any, k: Any, v: Any, traits: Any) -> Any:
        hit = torch.from_numpy(batch.ids == bad)
        if layer == self._last and hit.any():
            k = k.masked_fill(hit[:, None, None], float("inf"))
        return attend(self, batch, layer, q, k, v, traits)

    monkeypatch.setattr(GenericDecoder, "_attend", broken)
    errors = []
    settings: list[dict[str, Any]] = [{}, {"kv_memory": base.position_bytes * 64 * 3}, {"drafter": "ngram"}]
    for setting in settings:
        engine = base.with_settings(**{"drafter": "none", **setting})
        engine.reset_prefix_cache()
        errors.append([c.error for c in engine.generate(requests)])
    base.reset_prefix_cache()
    assert errors[0] == errors[1] == errors[2]
    assert f"(token {tokens.index(bad)} of the completion)" in str(errors[0][1])
