"""Generating under a setting: the small cache is too small, the prefix cache holds what the setting says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.examples import thorough, usual

from detgen.engine.config import EngineConfig
from detgen.runner.block_manager import PAGE
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case
from detgen.verify.perturb.running import Subject


@pytest.fixture
def check(make_check: Callable[..., Check], pool: Pool) -> Check:
    found = make_check(pool)
    found.learn()
    return found


PREEMPTED = [
    Setting(batch=2, chunk=1, drafter="oracle", draft_tokens=16, neighbours="early", sampling="T=1.3 n=2"),
    Setting(batch=8, drafter="adversary", neighbours="broken", prefix_cache="cold", unverified=4),
    Setting(batch="all", drafter="model", neighbours="others", prefix_cache="shared", order="shuffle 1"),
]
OTHERS = [
    Setting(batch=2),
    Setting(batch=3, chunk=7, drafter="oracle", draft_tokens=8, prefix_cache="warm", order="reversed", slot=5),
    Setting(batch=8, chunk=1, drafter="oracle", draft_tokens=64, prefix_cache="shared", sampling="stop"),
    Setting(batch=3, drafter="ngram", draft_tokens=4, neighbours="early", sampling="T=0.8 penalties"),
]


@pytest.mark.parametrize("setting", usual(PREEMPTED, OTHERS), ids=str)
def test_preemption(check: Check, setting: Setting) -> None:
    """A sequence is preempted whoever drafts, and however prompts are read; without the axis nobody is."""
    for preemption in (True, False):
        turned = setting.turned("preemption", preemption)
        case = Case(turned, check.pool.watched(turned))
        before = check.result.preemptions
        assert check.attempt(case) is None
        assert (check.result.preemptions > before) == preemption


def test_a_check_says_where_nobody_was_preempted(check: Check) -> None:
    check.pool.growing = []
    check.run([Setting(batch=2, preemption=True), Setting(batch=2)])
    assert check.result.notes == ["1 of the settings with preemption did not need to preempt any request"]


def test_prefix_cache(check: Check) -> None:
    """Off, nothing is found; cold, what the prompts share; after the same queue all but last tokens; others leave less.

    That holds whatever ran before.
    """
    found = {}
    for value in ("warm", "shared", "cold", "off", "warm", "shared", "cold"):
        setting = Setting(batch=2, prefix_cache=value)
        case = Case(setting, check.pool.watched(Setting(batch=2, prefix_cache="cold")))
        task = check.task(case, check.reference(case))
        with check.subject.configured(task) as engine:
            before = engine.stats.reused_tokens
            list(engine.stream(task.queue))
            reused = engine.stats.reused_tokens - before
        assert found.setdefault(value, reused) == reused
    prompts = [check.subject.engine().encode(r) for r in case.watched]
    assert found["off"] == 0 < found["cold"] < found["shared"] < found["warm"]
    assert found["warm"] == sum(len(tokens) - 1 for tokens in prompts)


def test_variants_differ_in_one_token_of_a_block(check: Check) -> None:
    """In the first, the last, and a token between; and where the first block differs, the second one is the same."""
    base, *others = [list(r.token_ids or ()) for r in check.pool.variants]
    places = []
    for tokens in others:
        assert len(tokens) % PAGE == 1
        (place,) = [i for i, (a, b) in enumerate(zip(base, tokens, strict=False)) if a != b]
        places.append((place, len(tokens) // PAGE))
    assert places[:3] == [(0, 2), (PAGE - 1, 1), (PAGE // 2, 1)]
    assert PAGE < places[3][0] < 2 * PAGE - 1


def test_beginnings(check: Check) -> None:
    """One in three goes on, one is not verified, one has another token; what follows an unverified one is watched."""
    watched = check.pool.requests
    prompts = {r.id: check.subject.engine().encode(r) for r in watched}
    made = check.pool.beginnings([*watched, check.pool.longest()], prompts)
    assert len(made) == len(watched)
    for before, request in zip(watched, made, strict=True):
        tokens, own = prompts[before.id], list(request.token_ids or ())
        same = next((i for i, (a, b) in enumerate(zip(tokens, own, strict=False)) if a != b), len(tokens))
        if before.index % 3 == 0:
            assert same == len(tokens) < len(own)
        elif before.index % 3 == 1:
            assert own == tokens
        else:
            assert 0 < same < len(tokens) == len(own)
        assert request.params.deterministic == (before.index % 3 != 1)
    following = check.pool.following
    assert following is not None
    assert list(following.token_ids or ())[: len(prompts[watched[1].id])] == prompts[watched[1].id]


@thorough
def test_a_chat_is_rendered_beside_other_quantizations() -> None:
    """Their KV caches leave room to copy the process: together they are no larger than the first one."""
    config = EngineConfig(batch_size=16)
    subject = Subject(config)
    first = subject.engine()
    sizes = [subject.engine(quant).canonical.cache.keys[0].shape[0] for quant in ("q8", "q4")]
    assert sum(sizes) < first.canonical.cache.keys[0].shape[0] / 2
    assert subject.engine("q8").config.kv_memory
    given = Subject(EngineConfig(batch_size=16, kv_memory=64 << 20))
    given.engine()
    assert given.engine("q8").config.kv_memory == 64 << 20
