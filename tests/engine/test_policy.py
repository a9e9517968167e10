"""What a round attempts, for live sequences of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from detgen.drafters.none import NoDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.engine import policy as module
from detgen.engine.policy import ALONE, CHAINED, Policy
from detgen.engine.request import Request
from detgen.engine.running_batch import RunningBatch
from detgen.engine.sequence import Sequence as Sample
from detgen.kernels.input_batch import Windows
from detgen.params import SamplingParams

MOST_ROWS = 8


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a few rows at most."""
    monkeypatch.setattr(module, "MOST_ROWS", MOST_ROWS)


class Busy(Drafter):
    """One that has something to say, or not."""

    name = "busy"

    def __init__(self, *, idle: bool = False, while_reading: bool = True) -> None:
        self.resting, self.while_reading = idle, while_reading

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        return [Draft([], self.name) for _ in seqs]

    def idle(self) -> bool:
        return self.resting


def live_of(*params: dict[str, Any], reading: int = 0) -> RunningBatch:
    """So many sequences with prompts of three tokens that decode, and some that read."""
    live = RunningBatch()
    for order, how in enumerate([*params, *[{}] * reading]):
        sampling = SamplingParams(**{"max_tokens": 20, **how})
        request = Request(order, order, token_ids=(1, 2, 3), params=sampling)
        seq = Sample(request, 0, [1, 2, 3], 3, 3 + sampling.max_tokens)
        seq.order = order
        live.add(seq)
    live.reading[: len(params)] = False
    return live


def policy(
    drafter: Drafter, draft_tokens: int = 4, chains: bool = True, kept: int = 100, reads: bool = False, **passes: Any
) -> Policy:
    """One for passes that take a millisecond, unless a test says otherwise."""
    chaining = SimpleNamespace(kept=kept, reads=reads) if chains else None
    cost = SimpleNamespace(predict=lambda rows: 1e-3)
    given = {"chaining": chaining, "cost": cost, "most_drafted": MOST_ROWS - 1, "rewinds": True, **passes}
    return Policy(drafter, draft_tokens, SimpleNamespace(**given))


def windows_of(live: RunningBatch, drafts: int = 0) -> Windows:
    """The last token of each that decodes; the first one has drafts."""
    slots = live.decoding()
    lengths = np.ones(len(slots), np.int64)
    lengths[:1] += drafts
    return Windows(slots, live.length[slots] - 1, lengths, lengths, np.ones(lengths.sum(), np.int64))


def test_drafts_fit_a_pass() -> None:
    """A window is verified in one pass, with the token before it."""
    assert policy(Busy(), 4).draft_tokens(live_of({})) == 4
    assert policy(Busy(), 50).draft_tokens(live_of({})) == MOST_ROWS - 1
    assert policy(Busy(), 50, most_drafted=2).draft_tokens(live_of({})) == 2  # of a target that keeps states


@pytest.mark.parametrize(
    ("drafter", "params", "reading", "asked"),
    [
        (Busy(), [{}], 0, True),
        (Busy(), [{}], 1, True),
        (Busy(while_reading=False), [{}], 0, True),
        (Busy(while_reading=False), [{}], 1, False),
        (Busy(idle=True), [{}], 0, False),
        (NoDrafter(), [{}], 0, False),
        (Busy(), [{"deterministic": False}], 0, False),
        (Busy(), [{"deterministic": False}, {}], 0, True),
    ],
)
def test_who_is_asked(drafter: Drafter, params: list[dict[str, Any]], reading: int, asked: bool) -> None:
    """Not one that rests, not in vain, and not for unverified requests alone."""
    assert bool(policy(drafter).draft_tokens(live_of(*params, reading=reading))) == asked


def test_how_long_a_call_is() -> None:
    """A sequence alone goes on for as long as that takes little time, unless more than its limit may end it."""
    for seconds, length in ((1e-4, ALONE), (1e-3, 10), (1.0, CHAINED), (0.0, ALONE)):
        found = policy(NoDrafter(), cost=SimpleNamespace(predict=lambda rows, seconds=seconds: seconds))
        assert found.chain_length(live_of({})) == length
        assert found.chain_length(live_of({}, {})) == CHAINED
        assert found.chain_length(live_of({"stop": ("x",)})) == CHAINED
        assert found.chain_length(live_of(reading=1)) == CHAINED


def test_when_a_call_may_make_several_passes() -> None:
    """The windows have no drafts, none are to come, and they are all that there is to do."""
    two = live_of({}, {"deterministic": False})
    assert policy(NoDrafter()).may_chain(two, windows_of(two))
    assert policy(Busy(idle=True)).may_chain(two, windows_of(two))
    assert not policy(Busy()).may_chain(two, windows_of(two))
    assert not policy(NoDrafter(), chains=False).may_chain(two, windows_of(two))
    assert not policy(NoDrafter()).may_chain(two, windows_of(two, drafts=2))
    unverified = live_of({"deterministic": False})
    assert policy(Busy()).may_chain(unverified, windows_of(unverified))
    beside = live_of({}, reading=1)
    assert not policy(NoDrafter()).may_chain(beside, windows_of(beside))
    assert not policy(NoDrafter()).may_chain(RunningBatch(), windows_of(RunningBatch()))
    many = live_of(*[{}] * (MOST_ROWS + 1))
    assert not policy(NoDrafter()).may_chain(many, windows_of(many))


def test_when_a_call_may_make_several_rounds() -> None:
    """A device drafts, and nothing but logits and noise decides over tokens."""

    def rounds(*params: dict[str, Any], reading: int = 0, rounding: object = "there", plans: bool = True) -> int:
        drafter = Busy()
        drafter.plans = plans
        return policy(drafter, rounding=rounding).rounds(live_of(*params, reading=reading))

    assert rounds({}, {"temperature": 1.0, "stop": ("x",), "logprobs": 1}, {"deterministic": False}) == CHAINED
    assert rounds({}, reading=1) == CHAINED
    assert rounds({}, rounding=None) == rounds({}, plans=False) == 0
    assert rounds({}, {"frequency_penalty": 0.5}) == CHAINED
    assert rounds({"deterministic": False}) == rounds() == 0


def test_when_a_call_may_read_prompts() -> None:
    """Where the back end can, and nobody drafts meanwhile."""
    beside = live_of({}, reading=1)
    for drafter, may in ((NoDrafter(), True), (Busy(), False), (Busy(while_reading=False), True)):
        assert policy(drafter, reads=True).may_chain(beside, windows_of(beside)) == may
    assert not policy(NoDrafter(), reads=True).may_chain(beside, windows_of(beside, drafts=2))
    assert policy(NoDrafter(), reads=True).may_chain(live_of(reading=2), Windows.of(()))
    several, many = (live_of(*[{}] * n, reading=1) for n in (MOST_ROWS - 1, MOST_ROWS))
    assert policy(NoDrafter(), reads=True).may_chain(several, windows_of(several))
    assert not policy(NoDrafter(), reads=True).may_chain(many, windows_of(many))


def test_what_can_be_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No adjusted logits, as they change with each token; logits that are kept have to fit."""
    sampled, adjusted, wordy = {"temperature": 1.0}, {"presence_penalty": 1.0}, {"logprobs": 1}
    live = live_of(sampled, adjusted, wordy)
    found = policy(NoDrafter())
    assert found.may_foresee(live, np.array([0, 2]), 4)
    assert not found.may_foresee(live, np.array([0, 1]), 4)
    assert not policy(NoDrafter(), rewinds=False).may_foresee(live, np.array([0]), 1)  # of a target that keeps states
    formed = live_of({}, {"guided_regex": "a"})
    formed.formed[1] = True
    stands = policy(NoDrafter(), kept=0, rewinds=False)  # what is chosen, and penalties count it
    assert stands.may_foresee(live, np.array([0, 1, 2]), 400)
    assert not stands.may_foresee(formed, np.array([0, 1]), 4)
    monkeypatch.setattr(module, "_LOGITS", 2 * 4 * 100)
    assert found.may_foresee(live, np.array([0, 2]), 4)
    assert not found.may_foresee(live, np.array([0, 2]), 5)
