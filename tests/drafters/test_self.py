"""The target's fast path: drafts and unverified requests in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from detgen.drafters.self import FastPath, SelfDrafter
from detgen.passes.packing import Windows


def test_drafts_and_unverified_sequences_share_passes(predictable: Any, draftable: Callable[..., Any]) -> None:
    """One token a sequence and pass; unverified ones commit theirs each time, drafting ones never."""
    drafting = [draftable(0, [1, 2, 3]), draftable(2, [4, 5])]
    unverified = [draftable(1, [6, 7]), draftable(3, [8])]
    for seq in (*drafting, *unverified):  # prompts are read by canonical passes
        predictable.read(seq.slot, seq.tokens)
    want = [s.wanted(3) for s in drafting]
    wanted = [s.tokens + s.wanted(3) for s in unverified]
    before = [list(s.tokens) for s in drafting]

    def commit(windows: Windows, logits: torch.Tensor) -> None:
        assert [w.slot for w in windows] == [s.slot for s in unverified]
        assert len(logits) == len(unverified)
        for seq, token in zip(unverified, logits.argmax(-1).tolist(), strict=True):
            seq.tokens.append(token)

    drafter = SelfDrafter(FastPath(predictable, lambda: unverified, commit), 8)
    assert [d.tokens for d in drafter.draft(drafting, [3, 2])] == [want[0], want[1][:2]]
    assert [s.tokens for s in drafting] == before
    assert [s.tokens for s in unverified] == wanted
    assert [len(p) for p in predictable.passes] == [4, 4, 3]


def test_stops_at_an_end(predictable: Any, draftable: Callable[..., Any]) -> None:
    seq = draftable(0, [1, 2, 3])
    predictable.read(0, seq.tokens)
    want = seq.wanted(5)
    seq.ending = frozenset({want[1]})
    drafter = SelfDrafter(FastPath(predictable, lambda: [], lambda *_: None), 8)
    assert [d.tokens for d in drafter.draft([seq], [5])] == [want[: want.index(want[1]) + 1]]
    assert [d.tokens for d in drafter.draft([seq], [0])] == [[]]


def test_nothing_to_do_runs_no_pass(predictable: Any) -> None:
    assert FastPath(predictable, lambda: [], lambda *_: None).decode([]) == []
    assert predictable.passes == []


def test_a_round_without_drafts(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Unverified sequences alone: one pass, one token each."""
    unverified = draftable(5, [3, 1])
    predictable.read(5, unverified.tokens)
    want = unverified.wanted(1)
    got: list[int] = []
    fast = FastPath(predictable, lambda: [unverified], lambda _, logits: got.extend(logits.argmax(-1).tolist()))
    assert fast.decode([]) == []
    assert got == want
