"""Calls of several passes that read prompts, too: what they give is what rounds of one pass give."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.engine_inputs import code
from helpers.examples import examples
from helpers.families import DESCRIBED
from helpers.foreseeing import Entries, foreseeing
from helpers.loop import Loop, request
from hypothesis import assume, event, given
from hypothesis import strategies as st

from detgen import Completion, Engine, Request, SamplingParams
from detgen.engine import policy, scheduler
from detgen.engine.foreseen import Call, foresee
from detgen.engine.stats import EngineStats
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Window, Windows

TOKENS = [token for prompt in code(8) for token in prompt.encode()] * 9


def said(c: Completion, *, names: bool) -> Any:
    """All that a sample gives, with what the log says of each token's round; `names`: and whose empty drafts those are.

    That depends on whether anybody has drafted in the round.
    """
    told = [c.text, c.token_ids, c.finish_reason, c.stop_reason, c.error, c.prompt_tokens, c.logprobs]
    if names:
        return [*told, c.records, c.drafts]
    return [*told, [r if r.drafted is not None else r._replace(drafter="") for r in c.records]]


def run(engine: Engine, requests: list[Request], *, names: bool = True) -> tuple[dict[Any, Any], EngineStats]:
    """What each sample gives, and leaves in the cache; and what was counted."""
    engine.reset_prefix_cache()
    trace, counted = Entries(), engine.with_settings()
    counted.canonical.decoder = engine.canonical.decoder
    done = [c for batch in counted.stream(requests, trace=trace) for c in batch]
    return {
        (c.request.id, c.sample): (said(c, names=names), trace.found.get((c.request.id, c.sample))) for c in done
    }, counted.stats


def requests_of(prompts: list[tuple[int, int, SamplingParams]]) -> list[Request]:
    """By their lengths and first tokens."""
    return [
        Request(i, i, token_ids=tuple(TOKENS[first : first + length]), params=params)
        for i, (length, first, params) in enumerate(prompts)
    ]


def drawn(draw: random.Random) -> list[Request]:
    """Requests of every kind; in few lists is one with a form, whose passes are made one by one."""
    odd = draw.choice([{}] * 3 + [{"logprobs": 2}, {"guided_regex": "[a-z ]{9}"}])
    penalized = draw.choice([0.0, 0.0, 0.5, 1.0])
    count = draw.randint(1, 12)
    made = [
        SamplingParams(
            max_tokens=(most := draw.randint(1, 40)),
            ignore_eos=draw.random() < 0.5,
            min_tokens=min(draw.choice([0, 0, 1, 6]), most),
            stop=draw.choice([(), (), (), ("\n",), ("self", "return")]),
            temperature=draw.choice([0.0, 0.8, 1.5]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.getrandbits(63),
            deterministic=draw.random() < 0.8,
            repetition_penalty=draw.choice([1.0, 1.3]) if (counts := draw.random() < penalized) else 1.0,
            frequency_penalty=draw.choice([0.0, 0.5]) if counts else 0.0,
            logit_bias=draw.choice([{}, {32: 2.5, 101: -100.0}]) if counts else {},
            **(odd if i == count // 2 else {}),
        )
        for i in range(count)
    ]
    lengths = [draw.choice([draw.randint(1, 90), 63, 64, 65, 600]) for _ in made]
    return requests_of([(n, draw.choice([0, 0, 1, 70]), how) for n, how in zip(lengths, made, strict=True)])


@pytest.fixture(scope="module")
def of_states(random_model: Callable[..., Path]) -> Engine:
    config = DESCRIBED["qwen3_5_text"]()
    config.vocab_size = 4096
    return Engine(target=random_model(config), drafter="none", batch_size=16, kv_memory=16 << 20)


@examples(24)
@given(
    seed=st.integers(0, 2**32),
    batch=st.sampled_from([3, 1, 8, 16]),
    chunk=st.sampled_from([None, 1, 40]),
    cache=st.booleans(),
    tight=st.booleans(),
    broken=st.sampled_from([None, None, 32, 10]),
    keeps=st.sampled_from([False, False, True]),
    narrow=st.booleans(),
    drafter=st.sampled_from(["none", "none", "none", "ngram"]),
)
def test_all_that_is_said_stays(
    engines: Callable[..., Engine],
    of_states: Engine,
    seed: int,
    batch: int,
    chunk: int | None,
    cache: bool,
    tight: bool,
    broken: int | None,
    keeps: bool,
    narrow: bool,
    drafter: str,
) -> None:
    """Tokens, log-probabilities, rounds, entries: whatever is asked, where memory is short, with what is not finite.

    Layers may keep states, of which there are no snapshots on CUDA.
    """
    requests, cache = drawn(random.Random(seed)), cache and not keeps
    settings: dict[str, Any] = {"batch_size": batch, "prefill_chunk": chunk, "prefix_cache": cache, "drafter": drafter}
    engine = (of_states if keeps else engines(drafter="none", batch_size=16)).with_settings(**settings)
    if tight:
        engine = engine.with_settings(kv_memory=11 * BLOCK * engine.canonical.cache.entry_bytes)
    with (
        pytest.MonkeyPatch.context() as patch,
        nullcontext() if broken is None else engine.canonical.decoder.breaking(broken),
    ):
        for module in (policy, scheduler) if narrow else ():
            patch.setattr(module, "MOST_ROWS", 24)
        wanted, one_by_one = run(engine, requests, names=drafter == "none")
        with foreseeing(engine) as waits:
            found, stats = run(engine, requests, names=drafter == "none")
    assert found == wanted
    event(f"preempted: {stats.preemptions > 0}")
    event(f"calls of several passes: {len(waits) < stats.target_passes}")
    if broken is None:
        assert stats.tokens == one_by_one.tokens
        assert stats.prompt_tokens == one_by_one.prompt_tokens or cache or tight


def test_the_host_waits_once_for_several_passes(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody always reads, and those that end make room for others; once for each pass, it was before."""
    for module in (policy, scheduler):
        monkeypatch.setattr(module, "MOST_ROWS", 64)
    engine = engines(drafter="none", batch_size=16).with_settings(batch_size=16, prefix_cache=False)
    params = [SamplingParams(max_tokens=9 + 5 * i % 32, ignore_eos=True, temperature=i % 2 * 0.7) for i in range(64)]
    requests = requests_of([(5 + 37 * i % 120, i, how) for i, how in enumerate(params)])
    read, step = [0], engine._decoding.step
    monkeypatch.setattr(engine._decoding, "step", lambda: (step(), read.append(engine.stats.prompt_tokens))[0])
    with foreseeing(engine) as waits:
        engine.generate(requests)
    assert engine.stats.tokens == sum(how.max_tokens for how in params)
    assert np.count_nonzero(np.diff(read)) > 0.8 * len(waits), "nearly all calls read"
    assert len(waits) < 0.4 * engine.stats.target_passes


def foreseen_of(loop: Loop, most: int, *, goes_on: bool = True) -> Call:
    """What a call would make, with pages for it."""
    live, slots = loop.live, loop.live.decoding()
    loop.scheduler.reserve(most - 1)
    ones = np.ones(len(slots), np.int64)
    windows = Windows(slots, live.length[slots] - 1, ones, ones, live.last[slots], 0 * ones)
    return foresee(loop.scheduler, windows, most, goes_on=goes_on)


@examples(80)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(100, 300)), min_size=1, max_size=12),
    chunk=st.sampled_from([None, 1, 20]),
    before=st.integers(0, 5),
    most=st.integers(1, 6),
    rows=st.sampled_from([64, 12, 8]),
)
def test_they_are_the_passes_of_rounds(
    lengths: list[int], chunk: int | None, before: int, most: int, rows: int
) -> None:
    """The same chunks beside the same rows, in each round, as far as pages go; some take several passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MOST_ROWS", rows)
        loop = Loop(12, pages=200, prefill_chunk=chunk, prefix_cache=False)
        loop.most_drafts = 1
        for i, length in enumerate(lengths):
            loop.add(request(i, length, max_tokens=1 + 7 * i % 30))
        loop.scheduler.admit()
        loop.read = {seq: [] for seq in loop.live}
        for _ in range(before):
            loop.step()
        live = loop.live
        call, made = foreseen_of(loop, most), list[list[Window]]()
        begins = {w.slot: step for step, windows in enumerate([call.first, *call.later]) for w in windows if w.logits}
        lasts = dict(zip(call.slots.tolist(), (live.length[call.slots] - 1).tolist(), strict=True))
        ends = {slot: begins[slot] + n for slot, n in zip(call.slots.tolist(), call.lengths.tolist(), strict=True)}
        left = live.limit[call.slots] - live.length[call.slots]
        at = np.array([begins[slot] for slot in call.slots.tolist()], np.int64)
        assert (call.lengths <= left).all()
        assert (call.lengths <= loop.scheduler.room(call.slots) + 1).all()
        assume((call.lengths == np.minimum(left, most - at)).all())
        passes = loop.scheduler.passes

        def noted(windows: Windows) -> list[Windows]:
            found = list(passes(windows))
            made.append([window for part in found for window in part])
            return found

        patch.setattr(loop.scheduler, "passes", noted)
        steps = max(1 + len(call.later), *ends.values(), 0) if live else 0
        for step in range(steps):
            chunks = [call.first, *call.later][step] if step <= len(call.later) else Windows.of(())
            wanted = {w.slot: (w.start, len(w.tokens), w.logits) for w in chunks}
            going = [slot for slot, end in ends.items() if begins[slot] < step < end]
            wanted |= {slot: (lasts[slot] + step - begins[slot], 1, 1) for slot in going}
            loop.step()
            assert len(made) == step + 1
            found: dict[int, tuple[int, int, int]] = {}
            for w in made[-1]:  # a prompt may be read in several passes of a round
                start, count, logits = found.get(w.slot, (w.start, 0, 0))
                found[w.slot] = start, count + len(w.tokens), logits + w.logits
            assert found == wanted


def test_how_far_each_goes() -> None:
    """To its limit and to the end of its pages; where requests wait, not far beyond the first that ends."""
    loop = Loop(3, pages=4, prefix_cache=False)
    loop.most_drafts = 1
    for i, (length, more) in enumerate([(4, 3), (62, 50), (70, 50), (70, 50)]):
        loop.add(request(i, length, max_tokens=more))
    loop.step()
    assert foreseen_of(loop, 4).lengths.tolist() == [2, 2, 2]
    loop.scheduler.waiting.clear()
    assert foreseen_of(loop, 4).lengths.tolist() == [2, 2, 4]


def test_who_waits_for_a_prompt_does_not_wait_longer() -> None:
    """A call ends with its first pass where others go on from what it reads."""
    loop = Loop(3, pages=40)
    loop.add(request(0, 100, n=3, max_tokens=20))
    loop.scheduler.admit()
    call = foreseen_of(loop, 4)
    assert (call.lengths.tolist(), call.later) == ([1], [])


def test_where_somebody_drafts_it_ends_with_the_last_prompt() -> None:
    loop = Loop(3, pages=40, prefill_chunk=30)
    loop.add(request(0, 50, max_tokens=20))
    loop.add(request(1, 5, max_tokens=20))
    loop.scheduler.admit()
    call = foreseen_of(loop, 4, goes_on=False)
    assert (call.slots.tolist(), call.lengths.tolist(), len(call.later)) == ([1, 0], [2, 1], 1)
