"""The arrays of live sequences say what their sequences say."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Request
from detgen.engine.running_batch import RunningBatch
from detgen.engine.sequence import Sequence
from detgen.params import SamplingParams


def sequence(order: int, length: int, **params: Any) -> Sequence:
    tokens = tuple(range(order, order + length))
    seq = Sequence(
        Request(order, order, token_ids=tokens, params=SamplingParams(**params)), 0, list(tokens), length, 500
    )
    seq.order = order
    return seq


@examples(60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 9)),
            st.tuples(st.sampled_from(["commit", "remove"]), st.integers(0, 40)),
        ),
        max_size=80,
    )
)
def test_arrays_follow_the_sequences(steps: list[tuple[str, int]]) -> None:
    """Slots are the lowest that are free; committed tokens are in the arrays and in the sequences."""
    live = RunningBatch()
    known: dict[int, Sequence] = {}
    for order, (what, number) in enumerate(steps):
        if what == "add":
            seq = sequence(order, number)
            free = next(i for i in range(len(known) + 1) if i not in known)
            assert live.add(seq) == seq.slot == free
            known[free] = seq
        elif known and what == "remove":
            slot = list(known)[number % len(known)]
            assert live.remove(slot) is known.pop(slot)
        elif known:
            slots = np.array([slot for i, slot in enumerate(known) if (number >> i % 6) & 1] or list(known))
            counts = 1 + np.arange(len(slots)) * number % 3
            live.commit(slots, counts, np.arange(counts.sum()) + 1000 * order)
            flat = (np.arange(counts.sum()) + 1000 * order).tolist()
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                assert known[slot].tokens[-count:] == [flat.pop(0) for _ in range(count)]
        assert list(live) == list(known.values())
        assert np.flatnonzero(live.busy).tolist() == sorted(known)
        if known:
            assert live.youngest() == max(known, key=lambda slot: known[slot].order)
        for slot, seq in known.items():
            assert (live.last[slot], live.length[slot]) == (seq.tokens[-1], len(seq.tokens))
            assert bool(live.reading[slot]) == (not seq.generated)
    assert sorted([*live.decoding().tolist(), *live.still_reading().tolist()]) == sorted(known)


def test_what_asks_for_more() -> None:
    """Requests with stop strings, sampling, penalties or log-probabilities are marked, and no others."""
    live = RunningBatch()
    asked: list[dict[str, Any]] = [
        {},
        {"stop": ("x",)},
        {"stop_token_ids": (3,)},
        {"temperature": 0.5},
        {"repetition_penalty": 2.0},
        {"logprobs": 0},
        {"ignore_eos": True},
        {"deterministic": False},
    ]
    for order, params in enumerate(asked):
        live.add(sequence(order, 3, **params))
    n = len(asked)
    assert np.flatnonzero(live.watched[:n]).tolist() == [1, 2]
    assert np.flatnonzero(live.choosy[:n]).tolist() == [3, 4]
    assert np.flatnonzero(live.wordy[:n]).tolist() == [5]
    assert np.flatnonzero(~live.eos[:n]).tolist() == [6]
    assert np.flatnonzero(~live.verified[:n]).tolist() == [7]
