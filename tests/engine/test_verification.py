"""The verdict on a window, and what the acceptance log makes of it."""

from __future__ import annotations

import numpy as np
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.pass_results import WantedRows
from detgen.engine.records import NONE, STATUSES
from detgen.engine.request import Request
from detgen.engine.sequence import Sequence
from detgen.engine.verification import judge, log_columns
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.logprobs import Judged


def verify(drafted: list[int], chosen: list[int], last: int | None) -> tuple[list[int], list[str], list[int]]:
    """What one window commits, one token at a time: tokens, their statuses, and what is rolled back.

    Args:
        drafted: k tokens.
        chosen: k + 1 canonical choices.
        last: the token that ends the sequence.
    """
    tokens: list[int] = []
    statuses: list[str] = []
    for i, token in enumerate(chosen):
        tokens.append(token)
        agrees = i < len(drafted) and drafted[i] == token
        statuses.append("accepted" if agrees else "corrected" if i < len(drafted) else "bonus" if drafted else "plain")
        if token == last or not agrees:
            break
    return tokens, statuses, drafted[len(tokens) :]


def windows(some: list[tuple[list[int], list[int]]]) -> tuple[WantedRows, np.ndarray]:
    """The rows of windows with these drafts and choices, and the choices."""
    made = Windows.of(Window(i, 9, [0, *draft], len(draft) + 1) for i, (draft, _) in enumerate(some))
    return WantedRows.of(made), np.array([token for _, chosen in some for token in chosen])


TOKENS = st.integers(0, 3)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    drafted = draw(st.lists(TOKENS, max_size=6))
    return drafted, draw(st.lists(TOKENS, min_size=len(drafted) + 1, max_size=len(drafted) + 1))


def test_the_figure() -> None:
    """T1' T2' T3' are drafted, T1 agrees, T2 does not: T1 and the verifier's T2 stand, T3' is rolled back."""
    t1, t2, t2_drafted, t3_drafted, t3, t4 = range(1, 7)
    rows, chosen = windows([([t1, t2_drafted, t3_drafted], [t1, t2, t3, t4])])
    verdict = judge(rows.firsts, rows.drafted, chosen, np.zeros(4, bool))
    assert (verdict.accepted.tolist(), verdict.committed.tolist()) == ([1], [2])


@examples(150)
@given(some=st.lists(rounds(), min_size=1, max_size=6), last=st.one_of(st.none(), TOKENS), broken=st.booleans())
def test_all_windows_at_once(some: list[tuple[list[int], list[int]]], last: int | None, broken: bool) -> None:
    """The arrays say of each window, and the log of each of its tokens, what is said one by one."""
    rows, chosen = windows(some)
    found = judge(rows.firsts, rows.drafted, chosen, chosen == last)
    want = [verify(draft, choices, last) for draft, choices in some]
    assert found.committed.tolist() == [len(tokens) for tokens, _, _ in want]
    assert found.accepted.tolist() == [statuses.count("accepted") for _, statuses, _ in want]
    committed = found.committed.copy()
    if broken:  # nothing of the first window stands
        committed[0], want[0] = 0, ([], [], [])
    n = int(committed.sum())
    judged = Judged(None, -np.arange(n, dtype=np.float32), np.arange(n, dtype=np.float64))
    entries, columns = log_columns(rows, chosen, committed, judged, np.ones(len(some), bool), chained=False)
    tokens = [each for tokens, _, back in want for each in [*tokens, *[NONE] * len(back)]]
    assert columns["token"].tolist() == tokens
    statuses = [each for _, statuses, back in want for each in [*statuses, *["rolled_back"] * len(back)]]
    assert [STATUSES[code] for code in columns["status"].tolist()] == statuses
    drafted = [[*draft, NONE][: len(w[0]) + len(w[2])] for (draft, _), w in zip(some, want, strict=True)]
    assert columns["drafted"].tolist() == [token for own in drafted for token in own]
    taken = columns["token"] != NONE
    assert columns["logprob"][taken].tolist() == judged.chosen.tolist()
    assert columns["margin"][taken].tolist() == judged.margins.tolist()
    assert np.isinf(columns["margin"][~taken]).all()
    assert rows.owner[entries].tolist() == [i for i, w in enumerate(want) for _ in range(len(w[0]) + len(w[2]))]


def test_an_unverified_window_is_called_so() -> None:
    rows, chosen = windows([([], [9]), ([], [8])])
    judged = Judged(None, np.zeros(2, np.float32), np.zeros(2))
    _, columns = log_columns(rows, chosen, np.ones(2, np.int64), judged, np.array([True, False]), chained=False)
    assert [STATUSES[code] for code in columns["status"].tolist()] == ["plain", "unverified"]


def test_running_acceptance() -> None:
    """Accepted over tried; old rounds fade."""
    seq = Sequence(Request(0, 0, token_ids=(1,)), 0, [1], 1, 100)
    seq.learn("model", 1, 2)
    assert seq.acceptance == {"model": (1.0, 2.0)}
    seq.learn("model", 1, 1)
    hits, tries = seq.acceptance["model"]
    assert 1.0 < hits < 2.0
    assert 2.0 < tries < 3.0
