"""The engine's counters are those of the acceptance logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, adversary
from helpers.records import count_records

from detgen import Engine, Request, SamplingParams
from detgen.engine.stats import DraftCounts


def added_up(records: list[Any]) -> DraftCounts:
    """The logs of several samples together."""
    total = DraftCounts()
    for log in records:
        total.add(count_records(log))
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "none"},
        {"drafter": "ngram", "draft_tokens": 3},
        {"drafter": "model", "draft_tokens": 4},
        {"drafter": adversary, "draft_tokens": 5},
        {"drafter": "auto"},
    ],
    ids=["none", "ngram", "model", "adversary", "auto"],
)
def test_stats_add_up(engines: Callable[..., Engine], settings: dict[str, Any]) -> None:
    """The acceptance logs give the engine's counters, the committed tokens, and every drafted token's fate."""
    engine = engines(**settings).with_settings(batch_size=4)  # nothing counted yet
    some = [
        Request(
            i,
            i,
            prompt=p,
            params=SamplingParams(max_tokens=20, temperature=0.4 * (i % 3), deterministic=i != 2, n=1 + i % 2),
        )
        for i, p in enumerate(PROMPTS)
    ]
    done = engine.generate(some)
    stats = engine.stats
    assert {k: v for k, v in stats.drafters.items() if v.rounds} == added_up([c.records for c in done])
    assert stats.tokens == sum(len(c.token_ids) for c in done)
    total = stats.drafters.total()
    assert total.drafted == total.accepted + total.corrected + total.rolled_back
    assert stats.tokens == total.accepted + total.corrected + total.bonus + total.plain + total.unverified
    assert stats.prompt_tokens + stats.reused_tokens == sum(c.prompt_tokens for c in done)
    assert stats.reused_tokens >= 3
    assert 1 < stats.peak_live <= 4
    assert stats.live == 0
    assert stats.rows >= stats.prompt_tokens
    assert stats.target_passes > 0
    assert (stats.draft_passes > 0) <= (settings["drafter"] in ("model", "auto"))
    for c in done:
        assert [r.token for r in c.records if r.token is not None] == list(c.token_ids)
        assert [r.position for r in c.records if r.token is not None] == list(range(len(c.token_ids)))
