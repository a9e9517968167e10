"""Which request goes where: longest first, equal beginnings together, each once and none too late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Request
from detgen.engine.score_requests import ScoreRequest
from detgen.params import SamplingParams
from detgen.workers import waiting
from detgen.workers.waiting import AHEAD, Waiting, errand_of


def request(index: int, prompt: str = "", max_tokens: int = 8, n: int = 1) -> Request:
    return Request(index, index, prompt=prompt or f"{index}", params=SamplingParams(max_tokens=max_tokens, n=n))


def drain(found: Waiting, workers: int = 1, samples: int = 1) -> list[tuple[int, int]]:
    """The worker and the index of each request, with workers that take in turns."""
    taken: list[tuple[int, int]] = []
    while True:
        found.look_ahead()
        if not len(found):
            return taken
        worker = len(taken) % workers
        taken += [(worker, errand.request.index) for errand in found.take(worker, samples)]


lots = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 3)), max_size=80)


@examples(80)
@given(lots, st.integers(1, 4), st.integers(1, 6))
def test_every_request_goes_once(lots: list[tuple[int, int, int]], workers: int, samples: int) -> None:
    requests = [request(i, "p" * 300 * group + str(i), most, n) for i, (group, most, n) in enumerate(lots)]
    found = Waiting(iter(requests))
    taken = drain(found, workers, samples)
    assert sorted(index for _, index in taken) == list(range(len(lots)))
    assert not found._groups
    assert not found._errands


def test_the_longest_go_first() -> None:
    sizes = [3, 50, 7, 120, 1, 60]
    taken = drain(Waiting(request(i, max_tokens=size) for i, size in enumerate(sizes)))
    assert [sizes[index] for _, index in taken] == sorted(sizes, reverse=True)


def test_a_cost_counts_prompt_and_samples() -> None:
    assert errand_of(request(0, "x" * 400, 10, 3)).cost == 100 + 30
    assert errand_of(Request(0, 0, token_ids=(1, 2, 3), params=SamplingParams(max_tokens=5))).cost == 8
    assert errand_of(ScoreRequest(0, 0, prompt="x" * 40, completions=("ab", "c"))).cost == 13
    chat = [{"role": "user", "content": "y" * 400}]
    assert errand_of(Request(0, 0, messages=chat, params=SamplingParams(max_tokens=1))).cost > 100


def test_prompts_that_begin_alike_stay_together() -> None:
    beginnings = [letter * 300 for letter in "abcd"]
    requests = [request(i, beginnings[i % 4] + str(i), 10 + i % 7) for i in range(160)]
    of: dict[int, set[int]] = defaultdict(set)
    for worker, index in drain(Waiting(iter(requests)), workers=4):
        of[worker].add(index % 4)
    assert all(len(groups) == 1 for groups in of.values())
    assert set.union(*of.values()) == {0, 1, 2, 3}


def test_a_worker_that_has_no_beginning_of_its_own_helps_others() -> None:
    requests = [request(i, "a" * 300 + str(i)) for i in range(40)]
    assert {worker for worker, _ in drain(Waiting(iter(requests)), workers=4)} == {0, 1, 2, 3}


def test_a_short_request_does_not_wait_for_ever() -> None:
    def requests() -> Iterator[Request]:
        yield request(0, max_tokens=1)
        for i in range(1, 20_000):
            yield request(i, max_tokens=50 + i % 50)

    places = {index: place for place, (_, index) in enumerate(drain(Waiting(requests())))}
    assert AHEAD < places[0] <= waiting._LONGEST_WAIT
    assert max(place - index for index, place in places.items()) <= waiting._LONGEST_WAIT


def test_what_was_sent_before_goes_first() -> None:
    found = Waiting(request(i, max_tokens=10 + i) for i in range(30))
    found.look_ahead()
    lost = found.take(0, 5)
    found.put_back(lost)
    assert len(found) == 30
    assert [errand.request.index for errand in found.take(1, 6)] == [29, 28, 27, 26, 25, 24]


def test_long_prompts_are_not_looked_at_so_far_ahead() -> None:
    read: list[int] = []

    def requests() -> Iterator[Request]:
        for i in range(100):
            read.append(i)
            yield request(i, "x" * 4_000_000)

    found = Waiting(requests())
    found.look_ahead()
    assert len(read) == 5
    found.take(0, 1)
    found.look_ahead()
    assert len(read) == 6


def test_memory_does_not_grow_with_the_requests() -> None:
    found = Waiting(request(i, f"{i % 9}" * 300 + str(i), 1 + i * 7919 % 100) for i in range(30_000))
    largest = 0
    while True:
        found.look_ahead()
        if not found.take(0, 8):
            break
        parts = (found._longest, found._order, *found._groups.values())
        largest = max(largest, sum(map(len, parts)))
    assert largest < 12 * AHEAD
