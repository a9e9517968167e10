"""Calls of several rounds of drafting and verifying: what they give is what rounds give that are seen one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.engine_inputs import code
from helpers.examples import examples, usual
from helpers.foreseeing import Entries, foreseeing
from helpers.loop import Loop, request
from hypothesis import event, given
from hypothesis import strategies as st

from detgen import Completion, Engine, Request, SamplingParams
from detgen.drafters.protocol import DraftPlan
from detgen.engine import decoding, scheduler
from detgen.engine.rounds_ahead import Ahead, rounds_ahead
from detgen.engine.stats import EngineStats
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Windows
from detgen.kernels.rounds import Round, Rounds
from detgen.kernels.triton import drafted_rounds
from detgen.runner import drafted_rounds as runner_rounds
from detgen.runner import model_runner

_PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {32: 2.5, 101: -100.0}},
    {"repetition_penalty": 1.3},
    {"min_tokens": 1},
]
TOKENS = [token for prompt in code(8) for token in prompt.encode()] * 9


def said(c: Completion, *, rounds: bool) -> Any:
    """All that a sample gives; `rounds`: with what the log says of each round, but whose empty drafts those are.

    That depends on whether anybody has drafted in the round.
    """
    told = [c.text, c.token_ids, c.finish_reason, c.stop_reason, c.error, c.prompt_tokens, c.logprobs]
    log = [r if r.drafted is not None else r._replace(drafter="") for r in c.records]
    committed = [(r.token, r.logprob, r.margin) for r in c.records if r.token is not None]
    return [*told, log if rounds else committed]


def run(engine: Engine, requests: list[Request], *, rounds: bool) -> tuple[dict[Any, Any], EngineStats]:
    """What each sample gives, and leaves in the cache; and what was counted."""
    engine.reset_prefix_cache()
    trace = Entries()
    done = [c for batch in engine.stream(requests, trace=trace) for c in batch]
    found = {
        (c.request.id, c.sample): (said(c, rounds=rounds), trace.found.get((c.request.id, c.sample))) for c in done
    }
    return found, engine.stats


def drawn(draw: random.Random) -> list[Request]:
    """Requests of every kind; in few lists is one that has a form, beside which rounds are single."""
    odd = draw.choice([{}] * 5 + [{"guided_regex": "[a-z ]{9}"}])
    penalized = draw.choice([0.0, 0.0, 0.5, 1.0])
    count = draw.randint(1, 9)
    made = [
        SamplingParams(
            max_tokens=draw.randint(1, 40),
            ignore_eos=draw.random() < 0.5,
            stop=draw.choice([(), (), (), ("\n",), ("self", "return")]),
            stop_token_ids=draw.choice([(), (), (32, 10)]),
            temperature=draw.choice([0.0, 0.8, 1.5]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.getrandbits(63),
            deterministic=draw.random() < 0.8,
            logprobs=draw.choice([None, None, 0, 2]),
            **(_PENALTIES[draw.randrange(3)] if draw.random() < penalized else {}),
            **(odd if i == count // 2 else {}),
        )
        for i in range(count)
    ]
    lengths = [draw.choice([draw.randint(1, 90), 60, 63, 64, 65, 150]) for _ in made]
    firsts = [draw.choice([0, 0, 1, 70]) for _ in made]
    return [
        Request(i, i, token_ids=tuple(TOKENS[first : first + n]), params=how)
        for i, (n, first, how) in enumerate(zip(lengths, firsts, made, strict=True))
    ]


@examples(32)
@given(
    seed=st.integers(0, 2**32),
    batch=st.sampled_from([3, 1, 8]),
    drafter=st.sampled_from(["model", "self", "auto", "ngram"]),
    draft_tokens=st.sampled_from([1, 3, 4, 9]),
    cache=st.booleans(),
    tight=st.booleans(),
    narrow=st.booleans(),
    broken=st.sampled_from([None, None, 32, 10]),
)
def test_all_that_is_said_stays(
    engines: Callable[..., Engine],
    seed: int,
    batch: int,
    drafter: str,
    draft_tokens: int,
    cache: bool,
    tight: bool,
    narrow: bool,
    broken: int | None,
) -> None:
    """Tokens, log-probabilities, entries, and where neither times nor pages nor slots decide, each draft's verdict.

    Whatever is asked, where memory is short, where a round takes several passes, with what is not finite.
    """
    requests = drawn(random.Random(seed))
    settings: dict[str, Any] = {"batch_size": batch, "prefix_cache": cache, "drafter": drafter}
    base = engines(drafter="model", batch_size=4)
    if tight:
        settings["kv_memory"] = 11 * BLOCK * base.position_bytes
    one_by_one, at_once = (base.with_settings(draft_tokens=draft_tokens, **settings) for _ in range(2))
    # `self` drafts while nobody reads, so its log is the same if all prompts are read in one pass.
    one_pass = batch >= len(requests) and not (narrow or cache) and sum(len(r.token_ids or ()) for r in requests) < 512
    rounds = not tight and (drafter in ("model", "ngram") or (drafter == "self" and one_pass))
    with (
        pytest.MonkeyPatch.context() as patch,
        nullcontext() if broken is None else base.canonical.decoder.breaking(broken),
    ):
        for module in (model_runner, scheduler) if narrow else ():
            patch.setattr(module, "MOST_ROWS", 16)
        wanted, before = run(one_by_one, requests, rounds=rounds)
        with foreseeing(at_once) as waits:
            found, stats = run(at_once, requests, rounds=rounds)
    assert found == wanted
    assert stats.tokens == before.tokens
    event(f"calls of several rounds: {len(waits) < stats.target_passes}")
    event(f"preempted: {stats.preemptions > 0}")


@pytest.mark.parametrize(("drafter", "waited"), usual([("model", 1.8), ("ngram", 0.9)], [("self", 1.8)]))
def test_the_host_waits_once_for_several_rounds(engines: Callable[..., Engine], drafter: str, waited: float) -> None:
    """It waited for each draft of a model, and then for its verdict."""
    settings: dict[str, Any] = {"drafter": drafter, "draft_tokens": 3, "prefix_cache": False}
    engine = engines(drafter="model", batch_size=4).with_settings(**settings)
    params = [SamplingParams(max_tokens=80, ignore_eos=True, temperature=i * 0.7) for i in range(2)]
    requests = [Request(i, i, token_ids=TOKENS[i : i + 9], params=how) for i, how in enumerate(params)]
    with foreseeing(engine) as waits:
        done = engine.generate(requests)
    rounds = max(r.round for c in done for r in c.records)
    assert len(waits) < 0.5 * rounds
    with foreseeing(engine) as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding.Policy, "rounds", lambda *_: 0)
        assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in done]
    assert len(waits) > waited * rounds


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"frequency_penalty": 0.2, "repetition_penalty": 1.1}, {"logprobs": 2, "n": 2}]
)
def test_what_is_looked_up_stays(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """In texts that repeat themselves, while others read prompts: outputs, entries and all verdicts; few fetches."""
    for module in (model_runner, runner_rounds, scheduler):
        monkeypatch.setattr(module, "MOST_ROWS", 32)
    settings: dict[str, Any] = {"drafter": "ngram", "draft_tokens": 3, "prefix_cache": False, "batch_size": 6}
    engine = engines(drafter="model", batch_size=4).with_settings(**settings)
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "seed": 5, **how})
    requests = [Request(i, i, token_ids=tuple(TOKENS[:n]), params=params) for i, n in enumerate((40, 70, 300))]
    wanted, stats = run(engine, requests, rounds=True)
    passes = stats.target_passes
    with foreseeing(engine) as waits:
        found, _ = run(engine, requests, rounds=True)
    assert found == wanted
    logs = [log for (*_, log), _ in found.values()]
    assert {"accepted", "corrected", "bonus"} <= {r.status for log in logs for r in log}
    assert len(waits) < 0.5 * passes


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_prompts_are_read_beside_drafts(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """In calls of several rounds, until somebody has read its prompt; it goes on in the next call."""
    for module in (model_runner, runner_rounds, scheduler):
        monkeypatch.setattr(module, "MOST_ROWS", 32)
    settings: dict[str, Any] = {"drafter": drafter, "draft_tokens": 3, "prefix_cache": False, "batch_size": 2}
    engine = engines(drafter="model", batch_size=4).with_settings(**settings)
    asked: list[list[int]] = []
    run_rounds = decoding.run_rounds

    def noting(target: Any, drafting: Any, of: Rounds) -> list[Round]:
        asked.append([sum(w.logits for w in chunk) for chunk in of.chunks])
        return run_rounds(target, drafting, of)

    monkeypatch.setattr(decoding, "run_rounds", noting)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    requests = [Request(i, i, token_ids=TOKENS[i : i + n], params=params) for i, n in enumerate((5, 200))]
    wanted = [c.token_ids for c in engine.generate(requests)]
    assert not asked
    with foreseeing(engine):
        assert [c.token_ids for c in engine.generate(requests)] == wanted
    assert asked[0] == [0, 0, 0, 0]
    assert next(of for of in asked if 1 in of)[-1] == 1
    assert all(1 not in of[:-1] for of in asked)
    assert asked[-1] == []


def test_a_verdict_that_is_wrong_is_found(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device goes on from something else than the host commits, no token of it is committed."""
    judge = drafted_rounds.Sheet.judge

    def wrong(sheet: Any, one: Any, packed: Any, broken: Any) -> None:
        judge(sheet, one, packed, broken)
        sheet.known[0, 4] += 1

    monkeypatch.setattr(drafted_rounds.Sheet, "judge", wrong)
    engine = engines(drafter="model", batch_size=4).with_settings(drafter="model")
    with foreseeing(engine), pytest.raises(AssertionError, match="the device commits what the host does"):
        engine.generate([Request(0, 0, token_ids=TOKENS[:9], params=SamplingParams(max_tokens=30, ignore_eos=True))])


def test_how_many_rounds() -> None:
    """As many as may be; where requests wait, not many more than until the first one ends."""
    loop = Loop(3, pages=12, prefix_cache=False)
    loop.most_drafts = 1
    for i, more in enumerate((9, 50, 50, 50)):
        loop.add(request(i, 4, max_tokens=more))
    loop.step()
    live, counts = loop.live, np.array([3, 3, 0])
    slots, ones = live.decoding(), np.ones(3, np.int64)
    windows = Windows(slots, live.length[slots] - 1, ones, ones, live.last[slots])
    plan = DraftPlan("ngram", "ngram", [3, 3], lambda *_: None, context=40)

    def asked(plan: DraftPlan, most: int = 4) -> Any:
        return rounds_ahead(loop.scheduler, windows, Ahead(plan, counts, most), lambda _: None)

    assert asked(plan).turns == 2
    assert asked(plan._replace(rounds=1)).turns == 1
    loop.scheduler.waiting.clear()
    assert asked(plan).turns == 4
    limits = asked(plan).limits
    assert limits.reach.tolist() == [12, 40, 40]
    assert limits.room.tolist() == [BLOCK] * 3
    assert limits.end.tolist() == [13, 54, 54]
    assert asked(plan).longest == 21
