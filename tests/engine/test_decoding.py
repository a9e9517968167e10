"""Which passes the loop runs: one a round for all, where there is anything to verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from detgen.drafters.protocol import Draft
from detgen.engine import Engine
from detgen.engine.request import Request, SamplingParams

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
    """Beside a verified request they take no passes of their own, and change nothing of it."""
    settings: dict[str, Any] = {} if drafter == "none" else {"draft_tokens": 1}
    engine = base.with_settings(drafter=drafter, **settings)
    alone = engine.generate([request(0, verified=True)])[0]
    rounds = engine.stats.target_passes
    engine = base.with_settings(drafter=drafter, **settings)
    beside = engine.generate([request(0, verified=True), *(request(i, verified=False) for i in (1, 2, 3))])
    assert beside[0].token_ids == alone.token_ids
    assert {r.status for c in beside[1:] for r in c.records} == {"unverified"}
    assert engine.stats.target_passes == rounds
    # Those that the accepted drafts of the verified one have outrun end by the fast path.
    assert engine.stats.fast_passes == TOKENS - rounds
    assert engine.stats.tokens == sum(len(c.token_ids) for c in beside) == 4 * TOKENS


def test_unverified_requests_alone_take_the_fast_path(base: Engine) -> None:
    """Their first token is the prompt's pass, the others are the fast path's."""
    engine = base.with_settings(drafter="none")
    engine.generate([request(i, verified=False) for i in range(3)])
    assert (engine.stats.target_passes, engine.stats.fast_passes) == (1, TOKENS - 1)


def test_unverified_requests_ride_with_drafts_of_the_fast_path(base: Engine) -> None:
    """Where the target drafts for itself, its passes carry them, and none is added."""
    engine = base.with_settings(drafter="self", verify_window=4)
    engine.generate([request(0, verified=True)])
    passes = engine.stats.target_passes, engine.stats.fast_passes
    engine = base.with_settings(drafter="self", verify_window=4)
    engine.generate([request(0, verified=True), request(1, verified=False)])
    assert engine.stats.target_passes == passes[0]
    assert engine.stats.fast_passes >= passes[1]


class Watching:
    """A drafter that drafts the right tokens for one sequence, and keeps what it is told of the rounds."""

    name = "watching"

    def __init__(self, right: list[int], slow: int) -> None:
        self.right, self.slow, self.patient = right, slow, False
        self.asked = 0
        self.rounds: list[tuple[int, int, bool]] = []

    def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
        """The right tokens for all sequences but the one that is slow; four of them."""
        self.asked += 1
        return [
            Draft(self.right[len(s.tokens) :][: min(n, 4)] if s.request.id != self.slow else [], self.name)
            for s, n in zip(seqs, lengths, strict=True)
        ]

    def timed(self, tokens: int, seconds: float, sequences: int, waiting: bool) -> None:
        """Keep it."""
        assert seconds > 0
        self.rounds.append((tokens, sequences, waiting))


@pytest.mark.parametrize("waiting", [0, 1])
def test_what_a_round_gave(base: Engine, waiting: int) -> None:
    """Its tokens, how many sequences there were, and whether requests wait."""
    params = SamplingParams(max_tokens=24)
    requests = [replace(request(0, verified=True), id=i, index=i, params=params) for i in range(3 + waiting)]
    alone = base.with_settings(drafter="none").generate(requests[:1])[0]
    drafter = Watching([*base.tokenizer.encode(alone.request.prompt), *alone.token_ids], slow=2)
    engine = base.with_settings(drafter=lambda _: drafter, draft_tokens=4, batch_size=3)
    assert {tuple(c.token_ids) for c in engine.generate(requests)} == {tuple(alone.token_ids)}
    assert drafter.rounds[:4] == [(5 + 5 + 1, 3, bool(waiting))] * 4


@pytest.mark.parametrize("told", [True, False])
def test_who_is_told_of_rounds_is_not_asked_while_prompts_are_read(
    base: Engine, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    if not told:
        monkeypatch.setattr(Watching, "timed", None)
    engine = base.with_settings(drafter=lambda _: drafter, batch_size=2)
    engine.generate(requests)
    assert any(asked) == (not told)


def test_a_patient_drafter_is_not_asked(base: Engine) -> None:
    drafter = Watching([], slow=0)
    drafter.patient = True
    engine = base.with_settings(drafter=lambda _: drafter)
    engine.generate([replace(request(0, verified=True), params=SamplingParams(max_tokens=50))])
    assert drafter.asked == 0
    # The first token is the prompt's; the round in which it ends says nothing of the speed.
    assert 0 < sum(tokens for tokens, *_ in drafter.rounds) < 49
