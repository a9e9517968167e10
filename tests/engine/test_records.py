"""The acceptance logs as columns: what was written of a sequence is what its records say, whoever was beside it."""

from __future__ import annotations

import math

import numpy as np
from helpers.examples import examples
from helpers.records import count_records
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.records import CODES, NONE, STATUSES, Log
from detgen.engine.request import TokenRecord

OWNERS = st.integers(0, 5)


@st.composite
def entries(draw: st.DrawFn) -> TokenRecord:
    """What the engine may write of one row; the round comes later."""
    status = draw(st.sampled_from(STATUSES))
    drafted = draw(st.integers(0, 9)) if status in ("accepted", "corrected", "rolled_back") else None
    if status == "rolled_back":
        return TokenRecord(draw(st.integers(0, 99)), 0, None, "model", drafted, status, None, None)
    logprob = draw(st.floats(-50, 0, width=32))
    margin = draw(st.one_of(st.none(), st.floats(0, 50, width=32)))
    drafter = "none" if status == "unverified" else draw(st.sampled_from(["none", "model", "ngram"]))
    return TokenRecord(draw(st.integers(0, 99)), 0, draw(st.integers(0, 9)), drafter, drafted, status, logprob, margin)


def write(log: Log, owner: int, records: list[TokenRecord]) -> None:
    def column(values: list[float], dtype: type) -> np.ndarray:
        return np.array(values, dtype)

    log.write(
        owner=column([owner] * len(records), np.int64),
        position=column([r.position for r in records], np.int64),
        round=column([r.round for r in records], np.int64),
        token=column([NONE if r.token is None else r.token for r in records], np.int64),
        drafted=column([NONE if r.drafted is None else r.drafted for r in records], np.int64),
        drafter=column([log.drafter(r.drafter) for r in records], np.int64),
        status=column([CODES[r.status] for r in records], np.int64),
        logprob=column([r.logprob or 0.0 for r in records], np.float32),
        margin=column([math.inf if r.margin is None else r.margin for r in records], np.float64),
    )


@examples(60)
@given(
    some=st.lists(st.tuples(OWNERS, st.lists(entries(), min_size=1, max_size=5), st.booleans()), max_size=40),
    many=st.booleans(),
)
def test_each_sequence_gets_its_own(some: list[tuple[int, list[TokenRecord], bool]], many: bool) -> None:
    """In the order in which they were written, also after others have ended and their entries are dropped."""
    log = Log()
    want: dict[int, list[TokenRecord]] = {}
    for turn, (owner, rows, ends) in enumerate(some):
        drafter = rows[0].drafter  # one a round
        rows = [r._replace(round=turn, drafter=drafter) for r in rows] * (200 if many else 1)
        write(log, owner, rows)
        want.setdefault(owner, []).extend(rows)
        if ends:
            ((records, counts),) = log.take([owner])
            assert records == want.pop(owner)
            assert counts == count_records(records)
    owners = sorted(want)
    for owner, (records, _) in zip(owners, log.take(owners), strict=True):
        assert records == want[owner]
    assert log.take([7]) == [([], {})]


def test_room_is_given_back() -> None:
    """What has ended takes no room for long."""
    log = Log()
    record = TokenRecord(0, 0, 5, "none", None, "plain", -1.0, 2.0)
    for owner in range(300):
        write(log, owner, [record] * 100)
        log.take([owner])
    assert len(log._columns["owner"]) < 10_000
