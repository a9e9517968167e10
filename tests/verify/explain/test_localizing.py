"""The first module that differs: of the passes that compute a position, the one that matters is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine_inputs import ids
from helpers.own_forward import decoders

from detgen import Engine, Request, SamplingParams
from detgen.kernels.generic.paged_attention import PagedAttention
from detgen.verify.explain.localizing import Origin, Recorded, Recording, locate
from detgen.verify.perturb.generation_digests import Difference

CROWD = [
    Request(i, i, token_ids=ids(n, 30 + i), params=SamplingParams(max_tokens=40, ignore_eos=True))
    for i, n in enumerate((60, 57))
]
YOUNGER = CROWD[-1]
PROMPT = 57
AHEAD = 2  # the token of the completion whose logits are looked at


@pytest.fixture
def scarce() -> Engine:
    """Too little room for two requests to the end: the younger one gives its pages back and is read again."""
    with decoders("generic"):
        base = Engine(drafter="none", kv_memory=16 << 20)
    return base.with_settings(batch_size=2, prefix_cache=False, kv_memory=base.position_bytes * 64 * 3)


def recorded(engine: Engine, difference: Difference, queue: list[Request]) -> Recorded:
    found = Recording(engine, difference).run(queue)
    assert found is not None
    return found


def origin(engine: Engine, what: str, position: int, wrong: Callable[[Engine], bool]) -> Origin:
    """What is said of the younger request where the first layer's attention is a bit off in some passes."""
    difference = Difference(YOUNGER.id, 0, what, position, position - PROMPT + 1)
    reference = recorded(engine, difference, [YOUNGER])
    assert engine.stats.preemptions == 0
    tried = engine.with_settings()
    attend = PagedAttention.attend

    def faulty(self: PagedAttention, layer: int, *args: Any) -> torch.Tensor:
        out = attend(self, layer, *args)
        return out * (1 + 2.0**-20) if layer == 0 and wrong(tried) else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedAttention, "attend", faulty)
        found = recorded(tried, difference, CROWD)
    assert tried.stats.preemptions > 0
    return locate(reference, found)


def test_a_token_was_chosen_before_its_request_was_preempted(scarce: Engine) -> None:
    """When the position is read again all is well; the pass that chose the token is the one."""
    position = PROMPT - 1 + AHEAD
    assert origin(scarce, "logits", position, lambda e: e.stats.preemptions == 0).module == "attention 0"
    assert origin(scarce, "logits", position, lambda e: e.stats.preemptions > 0).module is None


def test_entries_were_written_after_their_request_was_preempted(scarce: Engine) -> None:
    """Those of the pass that read the position again are the ones that stay."""
    assert origin(scarce, "keys", 9, lambda e: e.stats.preemptions > 0).module == "attention 0"
    assert origin(scarce, "keys", 9, lambda e: e.stats.preemptions == 0).module is None


def test_a_slot_was_anothers(engines: Callable[..., Engine]) -> None:
    """What an unverified request computed there is not taken for the next one's, which found it in the prefix cache."""
    engine = engines(drafter="none", batch_size=1).with_settings(batch_size=1)
    engine.reset_prefix_cache()
    first = Request(0, 0, token_ids=ids(130), params=SamplingParams(max_tokens=1, deterministic=False))
    second = Request(1, 1, token_ids=(*ids(128), 7, 7), params=SamplingParams(max_tokens=2))
    found = recorded(engine, Difference(1, 0, "keys", 9, -120), [first, second])
    assert engine.stats.reused_tokens == 128
    assert found.outputs == []
    assert "another prompt with the same beginning" in locate(found, found).note
    assert [len(x) for x in found.entries or ()] == [len(engine.canonical.cache.keys)] * 2
