"""What a round says of itself, for each way in which one can go."""

from __future__ import annotations

from typing import Any

import pytest

from detgen.report.drawing import instructive, stairs, window
from detgen.report.facts import MOST_TOKENS, windows
from detgen.report.svg import ticks
from detgen.report.texts import Texts
from detgen.report.window_life import Round, rounds_of

NAMELESS = Texts({"model": "/nowhere/model", "profile": {"target": {"name": "a model"}}})


def made(*entries: tuple[str, int | None, int | None], drafter: str = "ngram", round: int = 3) -> list[dict[str, Any]]:
    """Entries of a round: status, token, drafted."""
    return [
        {"position": i, "round": round, "status": status, "token": token, "drafted": drafted, "drafter": drafter}
        | {"margin": 0.25 if token is not None else None, "logprob": None}
        for i, (status, token, drafted) in enumerate(entries)
    ]


def only(records: list[dict[str, Any]]) -> Round:
    (found,) = rounds_of(records, NAMELESS)
    return found


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("plain", 5, None)], "Nobody drafted. The canonical pass chose #5."),
        ([("unverified", 5, None)], "The pass chose #5; nothing is promised of it."),
        (
            [("accepted", 5, 5), ("bonus", 6, None)],
            "The drafter ngram proposed 1 token. It stands, and the pass added #6 of its own: the bonus.",
        ),
        (
            [("accepted", 5, 5), ("accepted", 6, 6)],
            "The drafter ngram proposed 2 tokens. All of them stand, and the text ends there.",
        ),
        (
            [("corrected", 5, 7)],
            "The drafter ngram proposed 1 token. At position 0 the draft had #7, but the canonical pass chose #5, by a"
            " margin of 0.25: that is committed instead.",
        ),
        (
            [("accepted", 4, 4), ("corrected", 5, 7), ("rolled_back", None, 8)],
            "The drafter ngram proposed 3 tokens. The first one stands. At position 1 the draft had #7, but the"
            " canonical pass chose #5, by a margin of 0.25: that is committed instead, and 1 token drafted behind it is"
            " rolled back.",
        ),
        (
            [("accepted", 4, 4), ("rolled_back", None, 8), ("rolled_back", None, 9)],
            "The drafter ngram proposed 3 tokens. The text ends with #4; 2 tokens drafted behind the end are rolled"
            " back.",
        ),
        (
            [("rolled_back", None, 8)],
            "The drafter ngram proposed 1 token. What became of it is missing from the log.",
        ),
    ],
)
def test_a_round_says_what_happened(entries: list[tuple[str, int | None, int | None]], said: str) -> None:
    shown = only(made(*entries))
    assert shown.said() == said
    assert stairs([shown])
    assert (instructive([shown]) is shown) == (shown.drafted != [])
    assert window(shown)


def test_the_last_committed_token_stands_before_the_next_round() -> None:
    records = made(("accepted", 4, 4), ("corrected", 5, 7), ("rolled_back", None, 8)) + made(
        ("plain", 9, None), round=4
    )
    assert [r.before for r in rounds_of(records, NAMELESS)] == ["", "#5"]


def test_the_most_instructive_round_is_drawn() -> None:
    records = [
        *made(("accepted", 4, 4), ("bonus", 5, None), round=0),
        *made(("corrected", 5, 7), round=1),
        *made(("accepted", 4, 4), ("corrected", 5, 7), ("rolled_back", None, 8), round=2),
        *made(("accepted", 4, 4), ("corrected", 5, 7), ("rolled_back", None, 8), round=3),
    ]
    shown = instructive(rounds_of(records, NAMELESS))
    assert shown is not None
    assert shown.number == 2


def test_rounds_without_drafts_share_a_row_and_long_ones_are_cut() -> None:
    plain = [entry for i in range(MOST_TOKENS + 7) for entry in made(("plain", i, None), drafter="none", round=i)]
    (row,), left_out = windows(rounds_of(plain, NAMELESS))
    assert (row.rounds, len(row.cells), left_out) == (f"0–{MOST_TOKENS - 1}", MOST_TOKENS, 7)
    mixed = made(("plain", 1, None), round=0) + made(("corrected", 5, 7), round=1) + made(("plain", 1, None), round=2)
    assert [w.rounds for w in windows(rounds_of(mixed, NAMELESS))[0]] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("most", "want"), [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7, [0, 2, 4, 6, 8]), (1234, [0, 500, 1000, 1500])]
)
def test_an_axis_has_round_numbers(most: float, want: list[float]) -> None:
    assert ticks(most) == pytest.approx(want)
