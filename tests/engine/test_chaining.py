"""Passes in one call, where nothing but a row's logits decides, change nothing that a request gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.engine_inputs import code
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen import Completion, Engine, Request, SamplingParams
from detgen.engine import policy
from detgen.kernels.sampling import Choices

PROMPTS = code(8)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 40),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 3]),
    stop=st.sampled_from([(), ("\n",), ("self", "return")]),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 0.8, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    top_k=st.sampled_from([0, 0, 20]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.sampled_from([None, None, None, 2]),
    frequency_penalty=st.sampled_from([0.0] * 9 + [0.5]),
    deterministic=st.sampled_from([True, True, True, False]),
)


def said(completion: Completion, *, rounds: bool) -> Any:
    """All that a sample gives; `rounds`: with what the log says of each token's round."""
    committed = [r for r in completion.records if r.token is not None]
    found: list[Any] = [completion.text, completion.token_ids, completion.finish_reason]
    found.append([(r.token, r.logprob, r.margin) for r in committed])
    found.append(completion.logprobs)
    return [*found, completion.records, completion.drafts] if rounds else found


class Watching:
    """A trace, for whose sake logits are made, pass by pass."""

    chains = False

    def committed(self, *_: Any) -> None: ...

    def finished(self, *_: Any) -> None: ...


@pytest.mark.parametrize("drafter", ["none", "model", "auto"])
@examples(8)
@given(params=st.lists(PARAMS, min_size=1, max_size=8), batch=st.sampled_from([1, 3, 16]))
def test_all_that_is_said_stays(
    engines: Callable[..., Engine], drafter: str, params: list[SamplingParams], batch: int
) -> None:
    """Texts, log-probabilities and margins; without drafts, the whole log too: a round a token."""
    requests = [Request(i, i, prompt=PROMPTS[i], params=p) for i, p in enumerate(params)]
    engine = engines(drafter=drafter, batch_size=16).with_settings(batch_size=batch)
    watched = {c.request.id: c for batch in engine.stream(requests, trace=Watching()) for c in batch}
    for one in engine.generate(requests):
        undrafted = drafter == "none" or not one.request.params.deterministic
        assert said(one, rounds=undrafted) == said(watched[one.request.id], rounds=undrafted)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_takes_fewer_calls(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """And the same passes; a slot that others wait for is free at once when its sample reaches its limit."""
    engine = engines(drafter="none", batch_size=16).with_settings(batch_size=2)
    forward = engine.canonical
    calls: list[str] = []
    for name in ("run", "chain", "sample"):
        own = getattr(forward, name)
        monkeypatch.setattr(forward, name, lambda *a, own=own, name=name, **k: calls.append(name) or own(*a, **k))
    requests = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=n, ignore_eos=True, temperature=temperature))
        for i, (p, n) in enumerate(zip(PROMPTS[:4], (17, 18, 17, 18), strict=True))
    ]
    engine.generate(requests)
    if not forward.chaining:
        pytest.skip("only the native pass chains")
    assert calls.count("sample" if temperature else "chain") < 14
    assert calls.count("run") < 8
    assert engine.stats.target_passes <= 17 + 18 + 4


def test_a_sequence_alone_goes_on_for_longer(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call as long as it takes little time; no pass is run behind its end."""
    engine = engines(drafter="none", batch_size=16).with_settings(batch_size=1)
    forward = engine.canonical
    if not forward.chaining:
        pytest.skip("only the native pass chains")
    lengths: list[int] = []
    chain = forward.chain

    def watched(windows: Any, asked: Any, *more: Any) -> Any:
        lengths.append(int(asked.max()))
        return chain(windows, asked, *more)

    monkeypatch.setattr(forward, "chain", watched)
    (long,) = engine.generate([PROMPTS[0]], max_tokens=40, ignore_eos=True)
    monkeypatch.setattr(forward.cost, "predict", lambda *_: 1e-4)
    lengths.clear()
    engine.generate([PROMPTS[0]], max_tokens=40, ignore_eos=True)
    assert lengths == [16, 16, 7]  # the first token comes with the prompt
    monkeypatch.setattr(forward.cost, "predict", lambda *_: 1.0)
    lengths.clear()
    engine.generate([PROMPTS[0]], max_tokens=12, ignore_eos=True)
    assert lengths == [4, 4, 3]
    monkeypatch.setattr(forward.cost, "predict", lambda *_: 1e-4)
    monkeypatch.setattr(engine.live, "eos_ids", np.array([[long.token_ids[5]]]))
    before = engine.stats.target_passes
    (ended,) = engine.generate([PROMPTS[0]], max_tokens=40)
    assert ended.token_ids == long.token_ids[: long.token_ids.index(long.token_ids[5]) + 1]
    assert engine.stats.target_passes - before == len(ended.token_ids)


def test_what_was_not_likely_is_rolled_back(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that read another token than the one that is chosen in truth count for nothing."""
    engine = engines(drafter="none", batch_size=16).with_settings(batch_size=3)
    forward = engine.canonical
    if not forward.chaining:
        pytest.skip("only the native pass chains")
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, ignore_eos=True)
    requests = [Request(i, i, prompt=p, params=params) for i, p in enumerate(PROMPTS)]
    expected = [said(c, rounds=True) for c in engine.generate(requests)]
    sample, asked = forward.sample, []

    def astray(windows: Any, lengths: np.ndarray, choices: Choices, *more: Any) -> Any:
        found = sample(windows, lengths, replace(choices, seed=choices.seed + np.uint64(1)), *more)
        asked.append(int(lengths.sum()))
        return found

    monkeypatch.setattr(forward, "sample", astray)
    before = engine.stats.tokens
    assert [said(c, rounds=True) for c in engine.generate(requests)] == expected
    assert sum(asked) > 1.5 * (engine.stats.tokens - before)


def test_calls_leave_few_logits_behind(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there would be too many, passes are run one by one."""
    engine = engines(drafter="none", batch_size=16).with_settings(batch_size=4)
    forward = engine.canonical
    if not forward.chaining:
        pytest.skip("only the native pass chains")
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    requests = [Request(i, i, prompt=p, params=params) for i, p in enumerate(PROMPTS[:4])]
    assert forward.chaining is not None
    made: list[int] = []
    sample = forward.sample

    def watched(*given: Any) -> Any:
        tokens, logits, broken = sample(*given)
        made.append(logits.size)
        return tokens, logits, broken

    monkeypatch.setattr(forward, "sample", watched)
    engine.generate(requests)
    assert made
    monkeypatch.setattr(policy, "_LOGITS", max(made) - 1)
    made.clear()
    engine.generate(requests)
    assert not made


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@examples(6)
@given(params=st.lists(PARAMS, min_size=1, max_size=8), batch=st.sampled_from([1, 3, 16]))
def test_choices_made_on_a_device_say_the_same(
    engines: Callable[..., Engine], drafter: str, params: list[SamplingParams], batch: int
) -> None:
    """Where they come as scores of all rows, as from CUDA."""
    foreseeing = pytest.importorskip("helpers.foreseeing", exc_type=ImportError).foreseeing
    requests = [Request(i, i, prompt=PROMPTS[i], params=p) for i, p in enumerate(params)]
    engine = engines(drafter=drafter, batch_size=16).with_settings(batch_size=batch)
    wanted = [said(one, rounds=False) for one in engine.generate(requests)]
    with foreseeing(engine) as waits:
        assert [said(one, rounds=False) for one in engine.generate(requests)] == wanted
    assert waits
