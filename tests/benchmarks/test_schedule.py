"""The schedules that detgen's is compared with: the ideal one is played round by round, the old one has its figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from lengths import LONG, MOST_PROMPT, Lengths, draw_lengths
from policies import equal_slots, ideal, least_rounds
from schedule import Case, simulate


@dataclass
class Running:
    """A request in the slow ideal: tokens read and tokens generated."""

    request: Lengths
    read: int = 0
    made: int = 0

    def after(self) -> Running:
        return Running(self.request, self.read, self.made)

    @property
    def over(self) -> bool:
        return self.made == self.request.output


def play(running: list[Running], rows: int) -> int:
    """One round of what was admitted; returns the positions that it holds."""
    free = rows - sum(r.made > 0 for r in running)
    held = 0
    for each in running:
        if each.made:
            each.made += 1
        else:
            count = min(free, each.request.prompt - each.read)
            each.read += count
            free -= count
            each.made = int(each.read == each.request.prompt)
        held += each.read + max(each.made - 1, 0)
    running[:] = [r for r in running if not r.over]
    return held


def fits(running: list[Running], positions: int, rows: int) -> bool:
    """Whether all that was admitted can run to its end without more positions."""
    ahead = [r.after() for r in running]
    while ahead:
        if play(ahead, rows) > positions:
            return False
    return True


def slow_ideal(requests: list[Lengths], batch: int, positions: int, rows: int) -> int:
    waiting, running, rounds = list(requests), [], 0
    while waiting or running:
        for request in list(waiting):
            if len(running) < batch and fits([*running, Running(request)], positions, rows):
                waiting.remove(request)
                running.append(Running(request))
        play(running, rows)
        rounds += 1
    return rounds


REQUESTS = st.lists(
    st.builds(lambda prompt, output: Lengths(prompt, output, 40), st.integers(1, 60), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


@examples(200)
@given(requests=REQUESTS, batch=st.integers(1, 5), room=st.integers(0, 100), rows=st.sampled_from([6, 16, 64]))
def test_ideal_is_its_definition(requests: list[Lengths], batch: int, room: int, rows: int) -> None:
    positions = max(r.positions for r in requests) + room
    found = ideal(requests, batch, positions, rows)
    assert found.rounds == slow_ideal(requests, batch, positions, rows)
    assert found.rounds >= least_rounds(requests, batch, rows)
    assert found.live <= batch


def test_ideal_packs_pages() -> None:
    """Two requests of 65 positions, which are two pages from their second round on."""
    requests = [Lengths(64, 2, 2)] * 2
    assert ideal(requests, 2, 256, 512, page=64).rounds == 2
    assert ideal(requests, 2, 255, 512, page=64).rounds == 3
    assert ideal(requests, 2, 191, 512, page=64).rounds == 4
    assert ideal(requests, 2, 130, 512).rounds == 2


# Rounds and passes that detgen took before it had pages, its scheduler driven by the same lengths.
BEFORE = [
    (draw_lengths(1500, 102, 0, scale=0.1), 16, 16_384, 1_024, (2_737, 2_741)),
    (draw_lengths(1500, 410, 0, scale=0.1), 16, 4_096, 1_024, (10_220, 10_222)),
    (draw_lengths(1500, 1_024, 0), 256, 384_000, 131_072, (8_917, 9_551)),
    (draw_lengths(1500, 4_096, 0, long=0.02), 256, 384_000, 131_072, (39_406, 40_953)),
]


@pytest.mark.parametrize(("requests", "batch", "positions", "context", "taken"), BEFORE)
def test_equal_slots_take_what_they_took(
    requests: list[Lengths], batch: int, positions: int, context: int, taken: tuple[int, int]
) -> None:
    assert equal_slots(requests, batch, positions, 512, context)[:2] == taken


def test_lengths() -> None:
    drawn = draw_lengths(4000, 1_024, 3, long=0.02)
    assert drawn == draw_lengths(4000, 1_024, 3, long=0.02) != draw_lengths(4000, 1_024, 4, long=0.02)
    prompts = sorted(r.prompt for r in drawn)
    assert 180 < prompts[2000] < 220
    long = [p for p in prompts if p > MOST_PROMPT]
    assert 40 < len(long) < 120
    assert LONG[0] <= long[0] <= long[-1] <= LONG[1]
    assert max(r.output for r in drawn) == 1_024
    assert 180 < sorted(r.output for r in drawn)[2000] < 220


@pytest.mark.parametrize(("positions", "preempted"), [(2_048, False), (1_024, True)])
def test_detgen_generates_the_lengths(positions: int, preempted: bool) -> None:
    """Also where sequences are preempted, of which some tokens are read twice."""
    case = Case("small", 8, positions, 300)
    requests = [Lengths(20 + i, 180, 300) for i in range(20)]
    found = simulate(case, requests, 0)
    assert found.outcome.rounds >= least_rounds(requests, case.batch, 512)
    assert found.outcome.passes == found.outcome.rounds
    assert (found.preemptions > 0) == (found.again > 0) == preempted
