"""A request whose values are not finite ends with an error; whoever shares its pass or gets its slot is unharmed.

The embedding of a token is made NaN while the engine runs; both kinds of decoders are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.engine_inputs import PROMPTS, adversary
from helpers.examples import usual
from helpers.own_forward import KINDS, decoders

from detgen import Completion, Engine, Request, SamplingParams
from detgen.drafters.protocol import Draft, Drafter
from detgen.machine import CPU
from detgen.program.arrays import BFLOAT16, FLOAT32, same_bits
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache

BROKEN = 4095
LONG = tuple(range(100, 170))
ERROR = "the model's hidden states or logits are not finite at position {}"


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine whose passes are such."""
    with decoders(request.param):
        return Engine(kv_memory=64 << 20)


def good() -> list[Request]:
    """Requests that never see the broken token, greedy and sampled."""
    return [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=10, temperature=0.9 * (i % 2), seed=i, logprobs=2))
        for i, p in enumerate(PROMPTS)
    ]


def bad(**params: Any) -> list[Request]:
    """Requests with the broken token at several places, long enough to fill what others leave free."""
    return [
        Request(100 + at, f"bad {at}", token_ids=(*LONG[:at], BROKEN, *LONG), params=SamplingParams(**params))
        for at in (0, 5, 40, 70)
    ]


def settings() -> list[dict[str, Any]]:
    """How engines differ."""
    return usual(
        [
            {"drafter": "model", "batch_size": 2, "draft_tokens": 3, "prefill_chunk": 7},
            {"drafter": "auto", "batch_size": 16, "prefill_chunk": 1},
        ],
        [
            {"drafter": "none", "batch_size": 1},
            {"drafter": "ngram", "batch_size": 3, "draft_tokens": 4},
            {"drafter": adversary, "batch_size": 4, "draft_tokens": 3},
        ],
    )


def said(c: Completion) -> tuple[Any, ...]:
    return c.text, c.token_ids, c.logprobs, c.finish_reason, c.error


def test_others_are_unharmed(engine: Engine, observe: Callable[..., Any]) -> None:
    """Pages that held broken entries give the bits that fresh ones give."""
    want = observe(engine.with_settings(drafter="none", batch_size=1), good())
    beside = [r for pair in zip(bad(n=2), good(), strict=False) for r in pair] + good()[4:]
    for setting in settings():
        tried = engine.with_settings(**setting)
        with tried.canonical.decoder.breaking(BROKEN):
            found = observe(tried, beside)
            again = observe(tried, good())
        for key, one in want.items():
            assert found[key].differs(one) is None, (setting, key)
            assert again[key].differs(one) is None, (setting, key)


def test_the_error_depends_on_the_request_alone(engine: Engine) -> None:
    """It names the first broken position, whether that is read in a chunk, wanted for its logits or generated."""
    plain = engine.with_settings(drafter="none", batch_size=1)
    texts = [c.token_ids for c in plain.generate(good())]
    first = next(i for i in range(3, 10) if texts[0][i] not in texts[0][:i])
    told = texts[0][first]  # the request that generates it breaks off there
    prompt = len(engine.encode(good()[0]))
    for setting in settings():
        tried = engine.with_settings(**setting)
        with tried.canonical.decoder.breaking(BROKEN):
            for c in tried.generate([*bad(n=2), *bad(deterministic=False)]):
                at = int(str(c.request.id).split()[1])
                assert c.error == f"{ERROR.format(at)} (token {at} of the prompt)"
                assert said(c) == ("", (), None, "error", c.error)
                assert (c.records, c.drafts, c.prompt_tokens) == ((), {}, 71 + at)
            at_end = tried.generate([Request(0, 0, token_ids=(*LONG, BROKEN), params=SamplingParams(n=2))])
        assert [c.error for c in at_end] == [f"{ERROR.format(70)} (token 70 of the prompt)"] * 2
        assert [c.sample for c in at_end] == [0, 1]
        with tried.canonical.decoder.breaking(told):
            done = tried.generate([good()[0]])[0]
        assert done.error == f"{ERROR.format(prompt + first)} (token {first} of the completion)"


class Spoiler(Drafter):
    """Drafts what the reference says, then the broken token."""

    name = "spoiler"

    def __init__(self, known: list[list[int]]) -> None:
        self._known = known

    def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
        found = []
        for seq, n in zip(seqs, lengths, strict=True):
            whole = next((k for k in self._known if k[: len(seq.tokens)] == seq.tokens), seq.tokens)
            ahead = whole[len(seq.tokens) :][: n // 2]
            found.append(Draft([*ahead, BROKEN, *ahead][:n], self.name))
        return found


def test_a_broken_draft_token(engine: Engine, observe: Callable[..., Any]) -> None:
    """It stands after the rows that are committed, which do not see it, and is no error of the request."""
    want = observe(engine.with_settings(drafter="none", batch_size=1), good())
    known = [[*engine.encode(r), *want[r.id, 0].completion.token_ids] for r in good()]
    for tokens in (1, 2, 5, 8):
        tried = engine.with_settings(drafter=lambda _: Spoiler(known), draft_tokens=tokens, batch_size=3)
        with tried.canonical.decoder.breaking(BROKEN):
            found = observe(tried, good())
        for key, one in want.items():
            assert found[key].differs(one) is None, (tokens, key)


def test_a_prefix_with_a_broken_end_is_not_reused(engine: Engine) -> None:
    """What is shared is what is sound: a prompt that begins like a broken one, and a broken one twice."""
    tried = engine.with_settings(drafter="none", batch_size=1)
    with tried.canonical.decoder.breaking(BROKEN):
        params = SamplingParams(max_tokens=6)
        sound = Request(0, "sound", token_ids=(*LONG, 7), params=params)
        broken = Request(1, "broken", token_ids=(*LONG, BROKEN, *LONG), params=params)
        alone = tried.generate([sound])[0]
        done = [tried.generate([r])[0] for r in (broken, sound, broken, sound)]
    assert [said(c) for c in done[1::2]] == [said(alone)] * 2
    assert done[0].error == done[2].error == f"{ERROR.format(70)} (token 70 of the prompt)"


def test_broken_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the logits show: infinity breaks a row off, minus infinity is a token that cannot come."""
    tried = engine.with_settings(drafter="none", batch_size=2)
    forward = tried.canonical
    run = forward.run
    want = tried.generate(["def f(x):"], max_tokens=4)[0].token_ids
    for value, harmless in ((-math.inf, True), (math.inf, False), (math.nan, False)):

        def spoiled(*args: Any, value: float = value, **_: Any) -> np.ndarray:
            logits = run(*args)
            logits[:, 17] = value
            return logits

        monkeypatch.setattr(forward, "run", spoiled)
        for temperature in (0.0, 1.0):
            done = tried.generate(["def f(x):"], max_tokens=4, temperature=temperature)[0]
            assert (done.error is None) == harmless
            assert done.token_ids == want or not harmless or temperature
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_the_cache_stays_finite(dtype: np.dtype[Any]) -> None:
    """Whatever is written; finite values that the number format has keep their bits, others are rounded."""
    cache = KVCache([(1, 4, 4)], BlockManager(1), dtype, CPU)
    values = np.array([math.nan, math.inf, -math.inf, -0.0], np.float32).reshape(1, 1, 4)
    cache.write(0, np.array([3]), values, values)
    most = float(np.array(1e18).astype(dtype))
    assert cache.keys[0][0, :, :, 3].tolist() == cache.values[0][0, :, 3].tolist() == [[0.0, most, -most, -0.0]]
    plain = np.random.default_rng(0).standard_normal((5, 1, 4), np.float32)
    cache.write(0, np.arange(5), plain, -plain)
    assert same_bits(cache.keys[0][0, :, :, :5].transpose(2, 0, 1), plain.astype(dtype))
    assert same_bits(cache.values[0][0, :, :5].swapaxes(0, 1), (-plain).astype(dtype))
