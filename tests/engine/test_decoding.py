"""Which passes the loop runs: one a round for all, where there is anything to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.engine import Engine
from detgen.engine.request import Request
from detgen.params import SamplingParams

TOKENS = 12


def request(index: int, *, verified: bool) -> Request:
    """A prompt that goes on to its limit."""
    params = SamplingParams(max_tokens=TOKENS, deterministic=verified)
    return Request(index, index, prompt=f"def add_{index}(a, b):\n", params=params)


@pytest.fixture(scope="module")
def base(engines: Callable[..., Engine]) -> Engine:
    return engines(drafter="auto", batch_size=4, prefix_cache=False)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_unverified_requests_ride_in_canonical_passes(base: Engine, drafter: str) -> None:
    """Beside a verified request they take no passes of their own until it has ended, and change nothing of it."""
    settings: dict[str, Any] = {} if drafter == "none" else {"draft_tokens": 1}
    engine = base.with_settings(drafter=drafter, **settings)
    alone = engine.generate([request(0, verified=True)])[0]
    engine = base.with_settings(drafter=drafter, **settings)
    beside = engine.generate([request(0, verified=True), *(request(i, verified=False) for i in (1, 2, 3))])
    assert beside[0].token_ids == alone.token_ids
    assert {(r.drafter, r.status, r.drafted) for c in beside[1:] for r in c.records} == {("none", "unverified", None)}
    assert engine.stats.target_passes == TOKENS  # those that the accepted drafts of the verified one have outrun go on
    assert engine.stats.tokens == sum(len(c.token_ids) for c in beside) == 4 * TOKENS


class Stranger(Drafter):
    """Drafts what comes next, then tokens that no model has."""

    name = "stranger"

    def __init__(self, wanted: tuple[int, ...], unknown: int) -> None:
        self.wanted, self.unknown = wanted, unknown

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Two of the one, two of the other."""
        at = [seq.generated for seq in seqs]
        return [Draft([*self.wanted[n : n + 2], self.unknown, self.unknown], self.name) for n in at]


@pytest.mark.parametrize("unknown", [-1, -(10**30), 4096, 2**31, 10**30])
def test_drafts_end_before_tokens_that_the_target_does_not_have(base: Engine, unknown: int) -> None:
    alone = base.with_settings(drafter="none").generate([request(0, verified=True)])[0].token_ids
    engine = base.with_settings(drafter=lambda _: Stranger(tuple(alone), unknown))
    (found,) = engine.generate([request(0, verified=True)])
    assert found.token_ids == alone
    drafted = [record.drafted for record in found.records if record.drafted is not None]
    assert drafted
    assert unknown not in drafted


@pytest.mark.parametrize("drafter", ["none", "ngram", "auto"])
def test_nobody_is_asked_to_draft_for_unverified_requests(
    base: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, they have calls of several passes, as where nobody drafts; their tokens are those of verified ones."""
    engine = base.with_settings(drafter=drafter)
    forward, calls = engine.canonical, 0
    run = forward.run

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*args, **named)

    monkeypatch.setattr(engine._decoding._drafter, "draft", lambda *_: pytest.fail("it was asked"))
    monkeypatch.setattr(forward, "run", counted)
    done = engine.generate([request(i, verified=False) for i in range(3)])
    assert engine.stats.target_passes == TOKENS
    assert calls == (1 if forward.chaining else TOKENS)
    plain = base.with_settings(drafter="none").generate([request(i, verified=True) for i in range(3)])
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]


class Watching(Drafter):
    """A drafter that drafts the right tokens for one sequence, and keeps what it is told of the rounds."""

    name = "watching"
    while_reading = False

    def __init__(self, right: list[int], slow: int) -> None:
        self.right, self.slow, self.resting = right, slow, False
        self.asked = 0
        self.rounds: list[tuple[float, int]] = []

    def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
        """The right tokens for all sequences but the one that is slow; four of them."""
        self.asked += 1
        return [
            Draft(self.right[len(s.tokens) :][: min(n, 4)] if s.request.id != self.slow else [], self.name)
            for s, n in zip(seqs, lengths, strict=True)
        ]

    def idle(self) -> bool:
        """As a test says."""
        return self.resting

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """Keep it."""
        assert seconds > 0
        self.rounds.append((steps, sequences))


def test_what_a_round_gave(base: Engine) -> None:
    """Its tokens of each sequence, and how many sequences there were."""
    params = SamplingParams(max_tokens=24)
    requests = [replace(request(0, verified=True), id=i, index=i, params=params) for i in range(3)]
    alone = base.with_settings(drafter="none").generate(requests[:1])[0]
    drafter = Watching([*base.tokenizer.encode(alone.request.prompt), *alone.token_ids], slow=2)
    engine = base.with_settings(drafter=lambda _: drafter, draft_tokens=4, batch_size=3)
    assert {tuple(c.token_ids) for c in engine.generate(requests)} == {tuple(alone.token_ids)}
    assert drafter.rounds[:4] == [((5 + 5 + 1) / 3, 3)] * 4


@pytest.mark.parametrize("too", [True, False])
def test_whoever_wants_is_not_asked_while_prompts_are_read(base: Engine, too: bool) -> None:
    """Such a round is not told, so nothing could be learnt of it."""
    requests = [request(i, verified=True) for i in range(4)]
    requests[0] = replace(requests[0], params=SamplingParams(max_tokens=2 * TOKENS))
    asked = []

    class Asked(Watching):
        """Keeps whether prompts are read when it is asked."""

        def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
            asked.append(bool(engine.live.reading[engine.live.busy].any()))
            return super().draft(seqs, lengths)

    drafter = Asked([], slow=-1)
    drafter.while_reading = too
    engine = base.with_settings(drafter=lambda _: drafter, batch_size=2)
    engine.generate(requests)
    assert any(asked) == too


def test_an_idle_drafter_is_not_asked(base: Engine) -> None:
    drafter = Watching([], slow=0)
    drafter.resting = True
    engine = base.with_settings(drafter=lambda _: drafter)
    engine.generate([replace(request(0, verified=True), params=SamplingParams(max_tokens=50))])
    assert drafter.asked == 0
    # The first token is the prompt's; the round in which it ends says nothing of the speed.
    assert 0 < sum(steps for steps, _ in drafter.rounds) < 49
