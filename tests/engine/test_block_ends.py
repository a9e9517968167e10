"""Where snapshots are left and who waits for them: without a model, and by models with states, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checks import sweep
from helpers.engine_inputs import adversary, ids
from helpers.examples import usual
from helpers.families import DESCRIBED, ROWS
from helpers.loop import Loop, request
from helpers.snapshot_faults import SNAPSHOT_FAULTS

from detgen import Engine, Request, SamplingParams
from detgen.drafters.oracle import AdversaryDrafter, Known, OracleDrafter
from detgen.engine.sequence import Sequence
from detgen.program.arrays import same_bits
from detgen.runner.snapshots import Snapshots


def loop(batch: int, pages: int = 64, snapshots: int = 8, **settings: Any) -> Loop:
    return Loop(batch, pages, snapshots=snapshots, **settings)


def shared(rounds: Loop, todo: list[Sequence]) -> list[int]:
    return [rounds.shared[seq] for seq in todo]


def test_samples_of_a_prompt() -> None:
    """The first one reads it; the others go on from its last block end, without waiting for the rest."""
    rounds = loop(4)
    first, *others = rounds.add(request(0, 150, n=3, max_tokens=20))
    rounds.step()
    assert list(rounds.live) == [first]
    assert rounds.live.cached[first.slot] == 128
    rounds.step()
    assert list(rounds.live) == [first, *others]
    rounds.run([])
    assert shared(rounds, [first, *others]) == [0, 128, 128]
    assert rounds.scheduler.reused == 2 * 128


@pytest.mark.parametrize("common", [64, 100, 448, 512])
def test_prompts_that_begin_alike(common: int) -> None:
    """One reads what they have in common and leaves a snapshot where they part, since the others wait for it."""
    rounds = loop(16, pages=400)
    todo = rounds.run([request(i, 530, prefix=common) for i in range(40)])
    assert shared(rounds, todo) == [0, *39 * [common // 64 * 64]]


def test_where_nobody_waits() -> None:
    """The second prompt finds where it parts from the first, and leaves a snapshot for all others; one at a time."""
    rounds = loop(1)
    todo = rounds.run([request(i, 200, prefix=140) for i in range(5)])
    assert shared(rounds, todo) == [0, 0, 128, 128, 128]


def test_waiting_for_a_snapshot_alone() -> None:
    """The pages are there, the snapshot is still to come: of those that need it, only one reads."""
    rounds = loop(4, pages=100)
    rounds.run([request(0, 400, prefix=300)])
    todo = rounds.run([request(i, 400, prefix=300) for i in range(1, 9)])
    assert shared(rounds, todo) == [0, *7 * [256]]


def test_one_that_gives_up_is_not_waited_for() -> None:
    """Another one reads what it was to leave a snapshot of."""
    rounds = loop(4, pages=100, prefill_chunk=20)
    rounds.run([request(0, 400, prefix=300)])
    first, second = (rounds.add(request(i, 400, prefix=300))[0] for i in (1, 2))
    rounds.step()
    assert (first.slot, second.slot) == (0, -1)
    rounds.scheduler.release(first)
    rounds.run([])
    assert rounds.shared[second] == 0
    assert not rounds.scheduler._block_ends._coming  # type: ignore[union-attr]


def test_a_prompt_of_whole_blocks() -> None:
    """Its last token goes through a pass, so the same prompt goes on a block before; a longer one behind all of it."""
    rounds = loop(1)
    same, again = rounds.run([request(0, 128), request(0, 128)])
    assert shared(rounds, [same, again]) == [0, 64]
    longer = Request(1, 1, token_ids=(*(request(0, 128).token_ids or ()), 1, 2), params=SamplingParams(max_tokens=3))
    together = loop(2)
    assert shared(together, together.run([request(0, 128), longer])) == [0, 128]


def test_a_preempted_sequence_goes_on_from_a_snapshot() -> None:
    rounds = loop(3, pages=7)
    todo = [rounds.add(request(i, 70, prefix=64, max_tokens=140))[0] for i in range(3)]
    rounds.run([])
    assert rounds.scheduler.preemptions
    again = [seq for seq in todo if rounds.order.count(seq) > 1]
    assert again
    assert all(rounds.shared[seq] >= 64 for seq in again)


def test_few_of_many() -> None:
    """A long run of many prompts uses no more places than there are, and keeps what is used again and again."""
    rounds = loop(2, snapshots=3)
    todo = rounds.run([request(i, 200, prefix=80) for i in range(30)])
    assert shared(rounds, todo)[1:] == 29 * [64]
    assert rounds.snapshots is not None
    assert len(rounds.snapshots._owners) == 3


def test_without_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and no prompt is cut."""
    monkeypatch.delattr(Snapshots, "keep")
    rounds = loop(2, prefix_cache=False)
    todo = rounds.run([request(0, 200, n=3), request(0, 200)])
    assert shared(rounds, todo) == [0, 0, 0, 0]


# Of deltas beside an attention, of state spaces beside one; of convolutions beside one, of state spaces alone.
FAMILIES = usual(["qwen3_5_text"], ["falcon_h1", "jamba", "lfm2", "mamba2"])


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Engine:
    config = (DESCRIBED | ROWS)[request.param]()
    config.vocab_size = 4096
    return Engine(target=random_model(config), drafter="none", batch_size=8, kv_memory=8 << 20)


COMMON = ids(150)


def chats(count: int = 6) -> list[Request]:
    """Prompts that begin alike, two samples of each; some go on over the next block end."""
    params = SamplingParams(max_tokens=50, ignore_eos=True, n=2, temperature=0.8, seed=3)
    return [Request(i, i, token_ids=(*COMMON, *ids(9 + 17 * i, 700 * i)), params=params) for i in range(count)]


@pytest.fixture(scope="module")
def alone(engine: Engine, observe: Callable[..., Any]) -> dict[Any, Any]:
    """What they give one at a time where nothing is shared."""
    return observe(engine.with_settings(batch_size=1, prefix_cache=False), chats())  # type: ignore[no-any-return]


def oracle(engine: Engine, alone: dict[Any, Any]) -> Callable[[Any], OracleDrafter]:
    samples = [seq for request in chats() for seq in engine.sequences(request)]
    known = [Known(s.choice(), (*s.tokens, *alone[s.request.id, s.sample].completion.token_ids)) for s in samples]
    return lambda _: OracleDrafter(known)


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"batch_size": 1},
    "chunks": {"batch_size": 5, "prefill_chunk": 7},
    "blocks": {"batch_size": 8, "prefill_chunk": 64},
    "adversary": {"batch_size": 12, "drafter": adversary, "draft_tokens": 15},
    "oracle": {"batch_size": 3, "drafter": "oracle", "draft_tokens": 5},
    "self": {"batch_size": 4, "drafter": "self", "draft_tokens": 3},
    "preempted": {"batch_size": 6, "drafter": "ngram", "pages": 9},
}


@pytest.mark.parametrize("name", usual(["adversary", "preempted"], SETTINGS))
def test_bits(engine: Engine, alone: dict[Any, Any], observe: Callable[..., Any], name: str) -> None:
    """Of logits and KV entries, with and without what others read before, twice."""
    settings = dict(SETTINGS[name])
    if pages := settings.pop("pages", None):
        settings["kv_memory"] = engine.position_bytes * 64 * pages
    if settings.get("drafter") == "oracle":
        settings["drafter"] = oracle(engine, alone)
    engine.reset_prefix_cache()
    other = engine.with_settings(**settings)
    for _ in range(2):
        found = observe(other, chats())
        assert found.keys() == alone.keys()
        for key, one in alone.items():
            assert found[key].differs(one) is None, key
    assert other.stats.reused_tokens >= 2 * 10 * 128
    assert bool(other.stats.preemptions) == bool(pages)


def differences(engine: Engine, alone: dict[Any, Any], observe: Callable[..., Any]) -> list[Any]:
    """Samples that differ: drafts go over block ends, prompts go on from there, and pages are used again."""
    engine.reset_prefix_cache()
    know = oracle(engine, alone)
    drafting = engine.with_settings(
        batch_size=3, drafter=lambda parts: AdversaryDrafter(know(parts), engine.vocabulary, 0), draft_tokens=5
    )
    first = observe(drafting, chats())
    whole = [(*(c.request.token_ids or ()), *c.token_ids) for c in (alone[i, 0].completion for i in range(6))]
    longer = [
        Request(i, f"longer {i}", token_ids=(*tokens, 5, 6), params=SamplingParams(max_tokens=3, ignore_eos=True))
        for i, tokens in enumerate(whole)
    ]
    behind = observe(drafting, longer)
    engine.reset_prefix_cache()
    again = observe(engine.with_settings(batch_size=4), chats())
    read = observe(engine.with_settings(batch_size=1, prefix_cache=False), longer)
    pairs = [(alone, first), (alone, again), (read, behind)]
    return [key for want, found in pairs for key, one in want.items() if found[key].differs(one) is not None]


def test_no_differences(engine: Engine, alone: dict[Any, Any], observe: Callable[..., Any]) -> None:
    assert differences(engine, alone, observe) == []


@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS)
def test_faults_are_found(
    engine: Engine,
    alone: dict[Any, Any],
    observe: Callable[..., Any],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above fails where snapshots are broken."""
    SNAPSHOT_FAULTS[fault](monkeypatch)
    try:
        assert differences(engine, alone, observe)
    finally:
        monkeypatch.undo()
        sweep(engine)


class FinalStates:
    """A trace of the states of finished sequences, and of the rows that convolutions read again."""

    chains = False

    def __init__(self, engine: Engine) -> None:
        self.found: dict[tuple[Any, int], list[np.ndarray]] = {}
        self._states = engine.canonical.cache.states

    def committed(self, seq: Sequence, first: int, logits: np.ndarray) -> None:
        pass

    def finished(self, seq: Sequence, keys: np.ndarray, values: np.ndarray) -> None:
        states = self._states
        assert states is not None
        at = int(states.at[seq.slot])
        assert at == len(seq.tokens) - 1, "nothing is drafted, so that all rows are certain"
        parts = self.found[seq.request.id, seq.sample] = []
        for shape, layer in zip(states.shapes, states.layers, strict=True):
            if shape is not None and layer is not None:
                rows = [p % layer.convolved.shape[1] for p in range(at - shape.taps + 1, at)]
                parts += [layer.state[seq.slot].copy(), layer.convolved[seq.slot, rows]]


def test_states(engine: Engine) -> None:
    """They have the same bits in the end, whether all tokens were read or a snapshot was restored."""

    def run(**settings: Any) -> dict[tuple[Any, int], list[np.ndarray]]:
        engine.reset_prefix_cache()
        other = engine.with_settings(**settings)
        trace = FinalStates(other)
        for _ in other.stream(chats(), trace=trace):
            pass
        assert bool(other.stats.reused_tokens) == other.config.prefix_cache
        return trace.found

    want = run(batch_size=1, prefix_cache=False)
    for settings in ({"batch_size": 5}, {"batch_size": 3, "prefill_chunk": 11}):
        found = run(**settings)
        assert found.keys() == want.keys()
        assert all(same_bits(a, b) for key, parts in want.items() for a, b in zip(parts, found[key], strict=True)), (
            settings
        )


def test_scoring(engine: Engine) -> None:
    """The completions of a prompt share it; all figures are those of each by itself."""
    items = [(list(COMMON), [list(ids(5 + i, 900 * i)) for i in range(4)])]
    engine.reset_prefix_cache()
    apart = engine.with_settings(batch_size=1, prefix_cache=False)
    together = engine.with_settings(batch_size=4)
    want, found = apart.score(items), together.score(items)
    assert [score.logprobs for score in found] == [score.logprobs for score in want]
    assert (apart.stats.prompt_tokens, together.stats.reused_tokens) == (4 * 149 + 5 + 6 + 7 + 8, 3 * 128)
