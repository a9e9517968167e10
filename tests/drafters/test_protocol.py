"""What a drafter has without writing it: only a name and drafts have to be its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from detgen.drafters.none import NoDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting


class Plain(Drafter):
    """The least that a drafter can be."""

    name = "plain"

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        return [Draft([1] * n, self.name) for n in lengths]


def test_everything_else_has_a_default(draftable: Any) -> None:
    """It is asked in all rounds, for as many tokens as the user set, and is told in vain."""
    plain, seq = Plain(), draftable(0, [1, 2])
    assert plain.draft([seq], [2]) == [Draft([1, 1], "plain")]
    assert not plain.idle()
    assert plain.while_reading
    assert plain.draft_tokens is None
    plain.learn(seq, "plain", 1, 2)
    plain.timed(3.0, 0.1, 1)


def test_whoever_drafts_nothing_is_no_drafter() -> None:
    class Mute(Drafter):
        name = "mute"

    with pytest.raises(TypeError, match="draft"):
        Mute()  # type: ignore[abstract]


def test_none_is_always_idle(draftable: Any) -> None:
    none = NoDrafter()
    assert none.idle()
    assert none.draft([draftable(0, [1]), draftable(1, [2])], [3, 0]) == [Draft([], "none")] * 2
