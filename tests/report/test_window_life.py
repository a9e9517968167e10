"""What a round says of itself, for each way in which one can go."""

from __future__ import annotations

from typing import Any

import pytest

from detgen.report.texts import Texts
from detgen.report.window_life import MOST_ROUNDS, MOST_TOKENS, Round, instructive, rounds_of, stairs, windows

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
        ([("plain", 5, None)], "Nothing was drafted. The canonical pass chose #5."),
        ([("unverified", 5, None)], "The pass chose #5; it is not guaranteed."),
        (
            [("accepted", 5, 5), ("bonus", 6, None)],
            "The drafter ngram proposed 1 token. It stands, and the pass added #6: the bonus.",
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
            " canonical pass chose #5, by a margin of 0.25: that is committed instead, and 1 token drafted after it is"
            " rolled back.",
        ),
        (
            [("accepted", 4, 4), ("rolled_back", None, 8), ("rolled_back", None, 9)],
            "The drafter ngram proposed 3 tokens. The text ends with #4; 2 tokens drafted after the end are rolled"
            " back.",
        ),
        (
            [("rolled_back", None, 8)],
            "The drafter ngram proposed 1 token. The log does not say what became of it.",
        ),
    ],
)
def test_a_round_says_what_happened(entries: list[tuple[str, int | None, int | None]], said: str) -> None:
    shown = only(made(*entries))
    assert shown.said() == said
    assert (instructive([shown]) is shown) == (shown.drafted != [])


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


def test_stairs_are_cut_into_flights_that_fit_a_small_screen() -> None:
    steps = [made(("corrected", 5, 7), *[("rolled_back", None, 8)] * 7, round=i) for i in range(MOST_ROUNDS + 1)]
    for number, entries in enumerate(steps):
        for entry in entries:
            entry["position"] += number
    long = [*made(*[("accepted", 5, 5)] * 40, round=99), {**made(("plain", 1, None), round=100)[0], "position": 40}]
    flights = stairs(rounds_of([entry for entries in steps for entry in entries], NAMELESS))
    assert [r.number for rounds in flights for r in rounds] == list(range(MOST_ROUNDS))
    assert [len(rounds) for rounds in flights] == [17, 17, 17, 9]
    assert [len(rounds) for rounds in stairs(rounds_of(long, NAMELESS))] == [1, 1]
