"""Digests and the comparison: the first difference, in the order of cause and effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from detgen.verify.perturb.generation_digests import Difference, Key, Observed, Tally, compare, digests

ROWS = [bytes([i]) * 8 for i in range(9)]
LINE = {"text": "abc", "finish_reason": "length", "logprobs": [{"token": 5, "logprob": -0.5, "top": []}]}
SEEN = Observed(4, (5, 6, 7), LINE, {"logits": ROWS[:3], "keys": ROWS[:6], "values": ROWS[3:9]})
CHUNKS: dict[str, list[Any]] = {"state": ROWS[:3], "thought": [(1,), (), ()]}
READ = replace(SEEN, parts=SEEN.parts | CHUNKS, chunk=2)  # its rows are three chunks


def _compared(reference: Mapping[Key, Observed], found: Mapping[Key, Observed]) -> tuple[Difference | None, Tally]:
    tally = Tally()
    return compare(reference, found, tally), tally


def test_digests_see_bits() -> None:
    """Minus zero is another digest than zero, a NaN the same as itself, in every number format."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0], [float("nan"), 1.0]], dtype=dtype)
        a, b, c, d = digests(x)
        assert a == c != b
        assert d == digests(x[3:])[0]
    strided = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)
    assert digests(strided) == digests(strided.contiguous())
    assert digests(torch.zeros(0, 4)) == []


def test_equal() -> None:
    difference, tally = _compared({("a", 0): SEEN}, {("a", 0): SEEN, ("unverified", 0): SEEN})
    assert difference is None
    assert tally.equal
    assert (tally.positions, tally.logits, tally.tokens) == (6, 3, 3)


def _first(seen: Observed = SEEN, **changes: Any) -> tuple[str, int, int, tuple[int | None, int | None]]:
    parts = seen.parts | {name: changes.pop(name) for name in seen.parts if name in changes}
    d, tally = _compared({("a", 0): seen}, {("a", 0): replace(seen, parts=parts, **changes)})
    assert not tally.equal or "line" in changes
    assert d is not None
    return d.what, d.position, d.place, d.tokens


def test_first_difference() -> None:
    """By position; of one row keys and values before logits, logits before tokens."""
    assert _first(tokens=(5, 9, 9)) == ("token", 4, 1, (6, 9))
    assert _first(tokens=(5, 6)) == ("token", 5, 2, (7, None))
    assert _first(logits=[*ROWS[:1], ROWS[8], ROWS[8]]) == ("logits", 4, 1, (6, 6))
    assert _first(logits=[*ROWS[:1], ROWS[8], ROWS[8]], tokens=(5, 9, 9)) == ("logits", 4, 1, (6, 9))
    assert _first(keys=[*ROWS[:4], ROWS[8], ROWS[8]], tokens=(5, 9, 9)) == ("keys", 4, 1, (6, 9))
    assert _first(values=[ROWS[0], *ROWS[4:9]]) == ("values", 0, -3, (None, None))
    for other in ({"text": "abd"}, {"finish_reason": "stop"}, {"logprobs": []}):
        assert _first(line=LINE | other) == ("line", 5, 2, (None, None))


def test_first_difference_of_a_model_that_thinks() -> None:
    """A state comes before all that is computed from it, a thought after its chunk's last row."""
    assert _compared({("a", 0): READ}, {("a", 0): READ})[1].chunks == 3
    assert _first(READ, state=[ROWS[0], ROWS[8], ROWS[8]]) == ("state", 2, -1, (None, None))
    assert _first(READ, state=[ROWS[0], ROWS[8]], keys=[*ROWS[:2], *ROWS[3:7]])[:2] == ("state", 2)
    assert _first(READ, state=[ROWS[0], ROWS[8]], keys=[*ROWS[:1], *ROWS[2:7]])[:2] == ("keys", 1)
    assert _first(READ, thought=[(1,), (2,), ()]) == ("thought", 3, 0, (5, 5))
    assert _first(READ, thought=[(1,), (2,), ()], tokens=(9, 6, 7))[0] == "thought"
    assert _first(READ, thought=[(1,), (2,), ()], logits=[ROWS[8], *ROWS[1:3]])[0] == "logits"
    assert _first(READ, thought=[(1,), ()])[:2] == ("thought", 5)
    assert _first(READ, line=READ.line | {"thoughts": [[0, "b"]]})[0] == "line"
    assert _compared({("a", 0): READ}, {("a", 0): replace(READ, parts=SEEN.parts)})[0] is None


def test_missing() -> None:
    """A sample that is not there is a difference; one from a store is compared without digests."""
    difference, tally = _compared({("b", 0): SEEN, ("a", 0): SEEN}, {("b", 0): SEEN})
    assert difference == Difference("a", 0, "missing", 0, -SEEN.prompt)
    assert (tally.tokens, tally.tokens_different) == (6, 3)
    kept = replace(SEEN, parts={})
    difference, tally = _compared({("a", 0): SEEN}, {("a", 0): kept})
    assert difference is None
    assert tally.positions == 0
