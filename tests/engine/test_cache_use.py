"""What is kept in the cache: little room changes no bit, what two prompts share is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_inputs import ids

from detgen import Engine, EngineError, Request, SamplingParams


def test_chunks_of_prompts(engines: Callable[..., Engine]) -> None:
    """No pass reads more of a prompt than the chunk: a prompt of 50 tokens takes 50 passes of one."""
    engine = engines(drafter="none", batch_size=16).with_settings(prefill_chunk=1, batch_size=1)
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
        params = SamplingParams(n=4, max_tokens=4, temperature=1.0, deterministic=deterministic)
        engine.generate([Request(0, 0, token_ids=ids(101), params=params)])
        assert engine.stats.prompt_tokens == 101 + 3
        assert engine.stats.reused_tokens == 3 * 100


def test_a_prefix_is_reused(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """A later prompt with the same beginning does not read it again, and its bits are the same."""
    engine = engines(drafter="ngram", batch_size=3).with_settings(batch_size=1)  # nothing counted yet
    first = Request(0, 0, token_ids=ids(80), params=SamplingParams(max_tokens=6))
    longer = Request(1, 1, token_ids=(*ids(80), 7, 7, 7), params=SamplingParams(max_tokens=6))
    observe(engine, [first])
    before = engine.stats.prompt_tokens
    found = observe(engine, [longer])
    assert engine.stats.prompt_tokens - before == 3
    want = observe(engines(drafter="none", batch_size=16), [longer])
    assert found[1, 0].differs(want[1, 0]) is None
