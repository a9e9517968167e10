"""Pages, sharing and the rows of passes, without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.examples import examples
from helpers.loop import Loop, request
from hypothesis import event, given
from hypothesis import strategies as st

from detgen.engine import scheduler
from detgen.engine.request import Request
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Window, Windows
from detgen.params import SamplingParams

MOST = 32


@pytest.fixture(scope="module", autouse=True)
def _small_passes() -> Iterator[None]:
    """Few rows fill a pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MOST_ROWS", MOST)
        yield


REQUESTS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 6), st.integers(20, 90), st.sampled_from([120, 128, 129, 400])),
        st.sampled_from([0, 0, 3, 4, 19, 64]),
        st.one_of(st.integers(1, 24), st.just(150)),
        st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@examples(80)
@given(
    some=REQUESTS,
    batch=st.integers(1, 6),
    pages=st.sampled_from([9, 12, 64]),
    cache=st.booleans(),
    chunk=st.sampled_from([None, 1, 20]),
    seed=st.integers(0, 99),
    snapshots=st.sampled_from([0, 0, 1, 3, 64]),
)
def test_any_schedule(
    some: list[tuple[int, int, int, int, bool]],
    batch: int,
    pages: int,
    cache: bool,
    chunk: int | None,
    seed: int,
    snapshots: int,
) -> None:
    """Whatever the requests: rows within a pass, tokens read once unless pages ran out, entries each one's own.

    So are the states, where there are any.
    """
    requests = [
        request(i, length, min(prefix, length), max_tokens=new, n=n, deterministic=verified)
        for i, (length, prefix, new, n, verified) in enumerate(some)
    ]
    loop = Loop(batch, pages, seed, snapshots, prefix_cache=cache, prefill_chunk=chunk)
    todo = loop.run(requests)
    event(f"preempted: {loop.scheduler.preemptions > 0}")
    event(f"shared: {loop.scheduler.reused > 0}")
    for seq in todo:
        again = loop.order.count(seq) - 1
        assert again or loop.read[seq] == list(range(loop.shared[seq], seq.prompt_length)), "each prompt token once"
    assert len(loop.order) - len(todo) == loop.scheduler.preemptions
    if loop.scheduler.preemptions == 0 and pages == 64 and not cache:
        assert loop.order == todo, "where all fit, first come, first served"


def test_a_slot_is_refilled_at_once() -> None:
    """When a request finishes, the next one takes its slot in the round after."""
    loop = Loop(2)
    loop.add(request(0, 4, max_tokens=1))
    loop.add(request(1, 4, max_tokens=50))
    loop.add(request(2, 4, max_tokens=50))
    assert [s.request.index for s in loop.step()] == [0]
    loop.step()
    assert sorted(s.request.index for s in loop.live) == [1, 2]


def test_looks_one_batch_ahead() -> None:
    """It wants a batch in the slots and one behind it, not the whole file."""
    loop = Loop(3)
    asked = 0
    while loop.scheduler.wants() > 0:
        loop.add(request(asked, 4))
        asked += 1
    assert asked == 6
    loop.step()
    assert loop.scheduler.wants() == 3


def test_long_requests_do_not_reserve_their_limit() -> None:
    """As many run together as their prompts and one more page each allow, whatever they may grow to."""
    loop = Loop(8, pages=16)
    for i in range(8):
        loop.add(request(i, 40, max_tokens=900))
    loop.step()
    assert len(loop.live) == 8


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """It is read in the rows that decoding leaves, at least half of them while others wait to be read."""
    loop = Loop(4)
    long, *others = (loop.add(request(i, 600 if i == 0 else 8, max_tokens=12))[0] for i in range(4))
    for _ in range(12):
        loop.step()
    assert all(s.remaining == 0 for s in others), "one token a round, whatever is read beside them"
    assert 0 < int(loop.live.cached[long.slot]) < 600
    assert len(loop.read[long]) >= 12 * MOST // 2
    loop.run([])
    assert loop.read[long] == list(range(600))


def test_many_decoding_leave_rows_for_reading() -> None:
    """Where the windows take whole passes, more passes are added: a prompt is read with half as many rows."""
    loop = Loop(2 * MOST + 1, pages=600)
    loop.most_drafts = 1
    for i in range(2 * MOST):
        loop.add(request(i, 1, max_tokens=60))
    for _ in range(30):
        loop.step()
    assert len(loop.live.decoding()) == 2 * MOST
    loop.add(request(99, 300, max_tokens=2))
    for _ in range(6):
        loop.step()
        assert loop.reading >= MOST


def test_samples_share_the_prompt() -> None:
    """The first sample reads the prompt; the others wait and take all of it but the last token."""
    loop = Loop(4)
    first, *others = loop.add(request(0, 100, n=3, max_tokens=20))
    for _ in range(4):
        assert list(loop.live) in ([], [first])
        loop.step()
    loop.step()
    assert [loop.shared[s] for s in others] == [99, 99]
    assert loop.scheduler.reused == 198
    assert loop.started == [(0, 0), (1, 99), (2, 99)]
    assert loop.table(first.slot)[0] == loop.table(others[0].slot)[0], "the whole block by reference"
    assert len({loop.table(s.slot)[1] for s in (first, *others)}) == 3, "each its own copy of the block it writes to"
    loop.run([])
    assert all(loop.read[s] == [99] for s in others)


def test_equal_beginnings_are_read_once() -> None:
    """However many prompts begin alike, one reads the whole blocks; the others wait for it, then go on together."""
    loop = Loop(16, pages=400)
    todo = loop.run([request(i, 520, prefix=512) for i in range(40)])
    assert sum(len(loop.read[s]) for s in todo) == 520 + 39 * 8
    assert all(loop.shared[s] == 512 for s in todo[1:])


def test_finished_requests_leave_their_entries() -> None:
    """Also what was generated is found by a prompt that goes on from it."""
    loop = Loop(1)
    loop.run([request(0, 60, max_tokens=80), request(1, 60)])
    tokens = (*request(0, 60).token_ids, *range(1000, 1080), 7)  # type: ignore[misc]
    (longer,) = loop.run([Request(2, 2, token_ids=tokens, params=SamplingParams(max_tokens=3))])
    assert loop.shared[longer] == 139, "all that was cached of it"


def test_without_the_prefix_cache() -> None:
    loop = Loop(2, prefix_cache=False)
    todo = loop.run([request(0, 200, n=3), request(0, 200)])
    assert all(loop.read[s] == list(range(200)) for s in todo)
    assert loop.scheduler.reused == 0


def test_entries_of_unverified_requests_are_shared() -> None:
    """They are canonical, too: what such a request decoded is found like its prompt."""
    loop = Loop(1)
    unverified = request(0, 70, max_tokens=80, deterministic=False)
    longer = Request(
        1, 1, token_ids=(*(unverified.token_ids or ()), *range(1000, 1078)), params=SamplingParams(max_tokens=3)
    )
    loop.run([unverified, longer])
    assert loop.shared[loop.order[1]] == 147


def test_a_long_request_is_not_starved() -> None:
    """One that does not fit lets as many others pass as there are slots, then all wait for it."""
    loop = Loop(4, pages=8)
    todo = loop.run([request(i, 400 if i == 2 else 50, max_tokens=90) for i in range(30)])
    admitted = [s.request.index for s in loop.order]
    behind = admitted[: admitted.index(2)]
    assert 1 < sum(i > 2 for i in behind) <= 4
    assert all(s.remaining == 0 for s in todo)


def test_the_youngest_gives_its_pages_back() -> None:
    """Where pages run out; it is read again when there is room, and goes on where it was."""
    loop = Loop(3, pages=6, prefix_cache=False)
    first, second, third = (loop.add(request(i, 60, max_tokens=110))[0] for i in range(3))
    while not loop.scheduler.preemptions:
        loop.step()
    assert third.slot < 0
    assert loop.scheduler.waiting[0] is third
    committed = list(third.tokens)
    assert len(committed) > 60
    loop.run([])
    assert third.tokens[: len(committed)] == committed
    assert loop.order == [first, second, third, third]
    assert loop.read[third] == list(range(len(committed)))


def test_nobody_passes_one_that_was_preempted() -> None:
    loop = Loop(3, pages=6)
    for i in range(8):
        loop.add(request(i, 60, max_tokens=110 if i < 3 else 2))
    while not loop.scheduler.preemptions:
        loop.step()
    loop.run([])
    admitted = [s.request.index for s in loop.order]
    assert admitted[:4] == [0, 1, 2, 2]


@pytest.mark.parametrize("positions", [384, 640, 5000])
def test_capacity(positions: int) -> None:
    """The longest sequence is one that takes all pages that may be used."""
    assert Loop(3, pages=100, positions=positions).scheduler.capacity == positions // BLOCK * BLOCK


@given(widths=st.lists(st.sampled_from([1, 2, 5, 15, 16, 17, 30, MOST - 1, MOST]), min_size=1, max_size=12))
def test_windows_fill_passes(widths: list[int]) -> None:
    """Windows of any widths go in order into passes that are full, and no fuller."""
    windows = [Window(i, 0, [1] * n, n) for i, n in enumerate(widths)]
    passes = [list(batch) for batch in Loop(12).scheduler.passes(Windows.of(windows))]
    assert [w for batch in passes for w in batch] == windows
    totals = [sum(len(w.tokens) for w in batch) for batch in passes]
    assert max(totals) <= MOST
    for total, following in zip(totals, passes[1:], strict=False):
        assert total + len(following[0].tokens) > MOST
