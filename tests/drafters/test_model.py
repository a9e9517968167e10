"""The draft model's cache follows the committed tokens, whatever was drafted and rolled back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detgen import Engine, Request, SamplingParams
from detgen.drafters.model import ModelDrafter
from detgen.kernels.input_batch import MOST_ROWS

VOCABULARY = 50


def make(passes: Any, context: int = 10_000) -> ModelDrafter:
    return ModelDrafter(passes, VOCABULARY, context)


@settings(examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.booleans()), min_size=1, max_size=10),
    seed=st.integers(0, 999),
)
def test_drafts_what_the_model_says(
    predictable: Any,
    draftable: Callable[..., Any],
    prompts: list[int],
    rounds: list[tuple[int, int, bool]],
    seed: int,
) -> None:
    """In every round, behind any mixture of accepted and rolled-back drafts, by some or all sequences."""
    rng = random.Random(seed)
    drafter = make(predictable)
    seqs = [draftable(i, [rng.randrange(VOCABULARY) for _ in range(n)]) for i, n in enumerate(prompts)]
    for seq in seqs:
        drafter.start(seq.slot, seq.tokens, 0)
    for length, accepted, skip in rounds:
        some = [s for s in seqs if not (skip and rng.random() < 0.5)]
        lengths = [rng.randrange(length + 1) for _ in some]
        drafts = [d.tokens for d in drafter.draft(some, lengths)]
        for seq, n, draft in zip(some, lengths, drafts, strict=True):
            assert draft == seq.wanted(n)
        for seq in seqs:
            draft = dict(zip(map(id, some), drafts, strict=True)).get(id(seq), [])
            seq.tokens += draft[:accepted]
            seq.tokens.append(rng.randrange(VOCABULARY))  # the verifier's own


def test_one_pass_a_token(predictable: Any, draftable: Callable[..., Any]) -> None:
    """All sequences together; what was committed since is read in the first pass of a round."""
    drafter = make(predictable)
    seqs = [draftable(i, [i, 2, 3, 4]) for i in range(4)]
    for seq in seqs:
        drafter.start(seq.slot, seq.tokens, 0)
    drafter.draft(seqs, [3, 3, 1, 0])
    assert [[len(w.tokens) for w in p] for p in predictable.passes] == [[4, 4, 4], [1, 1], [1, 1]]
    seqs[0].tokens += [7, 8]
    predictable.passes.clear()
    drafter.draft(seqs[:1], [1])
    assert [[(w.start, w.tokens) for w in p] for p in predictable.passes] == [[(4, [7, 8])]]


def test_long_prompts_take_several_passes(predictable: Any, draftable: Callable[..., Any]) -> None:
    """More to read than a pass holds: every sequence gets its draft."""
    most = MOST_ROWS
    drafter = make(predictable)
    seqs = [draftable(i, [(i + j) % VOCABULARY for j in range(n)]) for i, n in enumerate((most, 3, 2 * most + 1, 9))]
    for seq in seqs:
        drafter.start(seq.slot, seq.tokens, 0)
    assert [d.tokens for d in drafter.draft(seqs, [2] * 4)] == [s.wanted(2) for s in seqs]


@pytest.mark.parametrize("prefix", [6, 70, 128])
def test_pages_change_hands(predictable: Any, draftable: Callable[..., Any], prefix: int) -> None:
    """A new sequence starts from nothing, or from the shared tokens that the draft model has read."""
    drafter = make(predictable)
    begin = [i * i % VOCABULARY for i in range(prefix)]
    first = draftable(0, [*begin, 1, 2, 3, 4])
    predictable.read(0, first.tokens)  # by the target: the draft model's cache has the same pages
    predictable.entries.clear()
    drafter.start(0, first.tokens, 0)
    unread = draftable(2, [*begin, 9, 9])
    predictable.share(0, 2, unread.tokens, prefix)
    drafter.start(2, unread.tokens, prefix)
    assert [d.tokens for d in drafter.draft([unread], [3])] == [unread.wanted(3)]
    assert predictable.passes[0][0].start == 0, "nobody had read it for the draft model"
    drafter.draft([first], [4])
    shared = draftable(1, [*begin, 7, 9])
    predictable.share(0, 1, shared.tokens, prefix)
    drafter.start(1, shared.tokens, prefix)
    predictable.passes.clear()
    assert [d.tokens for d in drafter.draft([shared], [3])] == [shared.wanted(3)]
    assert predictable.passes[0][0].start == prefix, "what is shared is not read again"
    anew = draftable(0, [8, 8])
    predictable.pages.release(0)
    drafter.start(0, anew.tokens, 0)
    assert [d.tokens for d in drafter.draft([anew], [3])] == [anew.wanted(3)]


def test_shared_beyond_a_rolled_back_draft(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Committed tokens that the draft model predicted otherwise are not shared from its stale entries."""
    drafter = make(predictable)
    first = draftable(0, [1, 2, 3])
    drafter.start(0, first.tokens, 0)
    draft = drafter.draft([first], [5])[0].tokens
    first.tokens += [(draft[0] + 1) % VOCABULARY, 5, 6, 7, 8]
    follower = draftable(1, list(first.tokens))
    predictable.reach(0, len(first.tokens))
    predictable.share(0, 1, follower.tokens, len(first.tokens) - 1)
    drafter.start(1, follower.tokens, len(first.tokens) - 1)
    assert [d.tokens for d in drafter.draft([follower], [3])] == [follower.wanted(3)]


def test_nothing_behind_an_end(predictable: Any, draftable: Callable[..., Any]) -> None:
    """A draft stops at a token that ends the sequence and at the draft model's context."""
    seq = draftable(0, [1, 2, 3])
    want = seq.wanted(6)
    drafter = make(predictable)
    seq.ending = frozenset({want[2]})
    drafter.start(0, [], 0)
    cut = want.index(want[2]) + 1
    assert [d.tokens for d in drafter.draft([seq], [6])] == [want[:cut]]
    seq.ending = frozenset()
    short = make(predictable, context=5)
    short.start(0, [], 0)
    assert [d.tokens for d in short.draft([seq], [6])] == [want[:2]]
    seq.tokens += [4, 5, 6]
    assert [d.tokens for d in short.draft([seq], [6])] == [[]]


@pytest.fixture(scope="module")
def twins(demo_models: Any) -> Engine:
    """An engine whose draft model is its target."""
    both = {"target": demo_models.target, "draft": demo_models.target}
    return Engine(**both, draft_tokens=4, batch_size=4, kv_memory=64 << 20)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_perfect_draft_is_accepted(twins: Engine, temperature: float) -> None:
    """The target as its own draft model is right but for near-ties: the noise is shared."""
    engine = twins.with_settings(drafter="model")
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=6, n=2)
    texts = ["def add(a, b):\n", "import os\nimport", "class Node:\n    def __init__", "x = [1, 2"]
    done = engine.generate([Request(i, i, prompt=p, params=params) for i, p in enumerate(texts)])
    stats = engine.stats.drafters["model"]
    assert stats.drafted > 100
    behind_an_end = sum(c.finish_reason == "stop" for c in done) * 4
    assert stats.accepted >= 0.98 * stats.drafted - behind_an_end
