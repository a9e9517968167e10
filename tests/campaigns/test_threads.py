"""Many calls of one engine from eight threads, by every way to call it, with nested calls and streams left open."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS

from detgen import Engine, EngineError, Request, SamplingParams

pytestmark = pytest.mark.slow

KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_p": 0.9, "n": 2}]


def test_eight_threads(tries: Callable[[int], int], tally: Callable[..., None]) -> None:
    """Two hundred calls: each gives the texts that it gives alone."""
    engine = Engine(kv_memory=64 << 20, batch_size=4)
    others = [
        engine,
        engine.with_settings(drafter="none", batch_size=1),
        engine.with_settings(drafter="model", draft_tokens=3),
        engine.with_settings(drafter="model", draft_tokens=2, prefill_chunk=3),
    ]
    pool = [
        Request(
            i, i, prompt=PROMPTS[i % 7] + "#" * (i // 7), params=SamplingParams(max_tokens=4 + i % 9, **KINDS[i % 3])
        )
        for i in range(21)
    ]
    want = {(c.request.index, c.sample): c.token_ids for r in pool for c in engine.generate(r)}
    counts = {"calls": 0, "differing": 0, "nested": 0, "nested_not_refused": 0, "left_early": 0}

    def call(number: int) -> dict[str, int]:
        rng = random.Random(number)
        one, chosen, found = rng.choice(others), rng.sample(pool, rng.randint(1, 6)), {"calls": 1}
        way = rng.choice(["generate", "stream", "nested", "early"])
        if way == "generate":
            done = one.generate(chosen)
        else:
            done = []
            stream: Any = one.stream(chosen)
            for step, batch in enumerate(stream):
                done += batch
                if way == "nested":
                    found["nested"] = found.get("nested", 0) + 1
                    try:
                        rng.choice(others).generate(PROMPTS[0], max_tokens=2)
                        found["nested_not_refused"] = 1
                    except EngineError:
                        pass
                elif way == "early" and step == 2:
                    found["left_early"] = 1
                    break
            stream.close()
        wrong = [c for c in done if c.token_ids != want[c.request.index, c.sample]]
        whole = found.get("left_early") or len(done) == sum(r.params.n for r in chosen)
        return {**found, "differing": len(wrong) + (not whole)}

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(call, range(tries(200))):
            for name, count in found.items():
                counts[name] += count
    tally(**counts)
    assert counts["differing"] == counts["nested_not_refused"] == 0
