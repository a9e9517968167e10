"""Drafts that are wrong: the output stays, and rolling back moves and makes no memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, Adversary, adversary, ids
from helpers.examples import usual

from detgen import Engine, Request, SamplingParams


def test_a_drafter_of_ones_own(engines: Callable[..., Engine]) -> None:
    """A drafter from outside, given the engine's own by name: whatever it drafts, the output stays."""
    base = engines(drafter="auto", batch_size=3)
    given: list[Any] = []
    engine = base.with_settings(drafter=lambda named: given.append(sorted(named)) or Adversary(), draft_tokens=5)
    done = engine.generate(PROMPTS, max_tokens=8)
    assert given == [["auto", "grammar", "model", "ngram", "none", "self"]]
    assert [c.token_ids for c in done] == [c.token_ids for c in base.generate(PROMPTS, max_tokens=8)]
    wrong = engine.stats.drafters["adversary"]
    assert wrong.rolled_back > wrong.drafted / 2


@pytest.fixture(scope="module")
def large() -> Engine:
    """An engine whose cache is larger than anything else that passes make."""
    return Engine(batch_size=16, kv_memory=1 << 30)


@pytest.mark.parametrize("drafter", usual([adversary, "self"], ["model"]))
def test_truncation_allocates_nothing(
    large: Engine, engines: Callable[..., Engine], observe: Callable[..., Any], drafter: Any
) -> None:
    """Through hundreds of roll-backs the cache's arrays stay where they are, and nothing of their size is made."""
    engine = large.with_settings(drafter=drafter, draft_tokens=6)
    engine.generate(PROMPTS[:1], max_tokens=4)  # copies of weights are made for the first draft
    caches = [passes.cache for passes in engine._prepared.runners]
    identities = [(id(x), x.ctypes.data, x.nbytes) for cache in caches for x in (*cache.keys, *cache.values)]
    some = [
        Request(i, i, token_ids=ids(n, 3 + i), params=SamplingParams(max_tokens=20, temperature=1.0, n=2))
        for i, n in enumerate((4, 60, 9, 200, 33, 4, 700))
    ]
    tracemalloc.start()
    try:
        found = observe(engine, some)
        _, made = tracemalloc.get_traced_memory()  # at most, in all
    finally:
        tracemalloc.stop()
    now = [x for cache in caches for x in (*cache.keys, *cache.values)]
    assert [(id(x), x.ctypes.data, x.nbytes) for x in now] == identities
    assert 0 < made < max(size for _, _, size in identities) / 2
    assert engine.stats.drafters.total().rolled_back > (5 if drafter == "self" else 500)  # it is hardly ever wrong
    want = observe(engines(drafter="none", batch_size=1), some)
    for key, one in want.items():
        assert found[key].differs(one) is None
