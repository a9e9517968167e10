"""Prepares rounds of drafting and verifying that one call runs before the host sees the first, and takes their results.

What a device commits only decides what the next round of the call reads: the host verifies each round again, and writes
it to the log like a round of its own. Affects only speed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from detgen.drafters.protocol import DraftPlan
from detgen.engine.pass_results import Ran
from detgen.engine.scheduler import Scheduler
from detgen.kernels.input_batch import Windows
from detgen.kernels.rounds import Limits, Round, Rounds
from detgen.kernels.sampling import Choices

_SPARED = 16  # live sequences per one that may end before a call is over, while others wait for its slot


def rounds_ahead(
    scheduler: Scheduler, windows: Windows, plan: DraftPlan, counts: np.ndarray, most: int, choices: Choices | None
) -> Rounds:
    """Return the rounds to run, at most `most`.

    Args:
        scheduler: has the live sequences, none of which reads a prompt.
        windows: the last token of each.
        plan: how they draft.
        counts: int64 [windows], most tokens that each drafts.
        most: see `Policy.rounds`.
        choices: how the next token of each is chosen; None if all take their largest logit.
    """
    live, slots = scheduler.live, windows.slots
    length, limit = live.length[slots], live.limit[slots]
    most = most if plan.rounds is None else min(most, plan.rounds)
    if scheduler.waiting:
        lasting = np.sort(-(-(limit - length) // (1 + counts)))
        most = min(most, int(lasting[len(slots) // _SPARED]))
    room = length + scheduler.room(slots)
    endings = [live[slot].ending for slot in slots.tolist()]
    ending = np.full((len(slots), max(map(len, endings))), -1, np.int64)
    for i, tokens in enumerate(endings):
        ending[i, : len(tokens)] = sorted(tokens)
    reach = np.minimum(np.minimum(limit - 1, room), plan.context)
    limits = Limits(counts, reach, room, limit, live.prompt[slots] + live.least[slots], ending)
    reads = Windows.of(plan.reads)
    return Rounds(max(most, 1), windows, live.prompt[slots], limits, reads, plan.again, choices)


def results(
    scheduler: Scheduler, asked: Rounds, plan: DraftPlan, rounds: list[Round], codes: tuple[int, int]
) -> Iterator[Ran]:
    """Yield the results of each round for sequences that have not ended; each is committed before the next is taken.

    Args:
        scheduler: has the live sequences.
        asked: the rounds that were asked for.
        plan: how they drafted.
        rounds: their results.
        codes: indexes into the log's names of drafters: of the one that drafted, and of the one of empty drafts.
    """
    live, drafted = scheduler.live, asked.limits.drafted
    for windows, which, scores, broken in rounds:
        there = live.busy[windows.slots]
        slots = windows.slots[there]
        firsts = (windows.lengths.cumsum() - windows.lengths)[there]
        known = (live.length[slots] - 1 == windows.starts[there]) & (live.last[slots] == windows.tokens[firsts])
        assert known.all(), "the device commits what the host does"
        if not len(slots):
            break
        rows = np.repeat(there, windows.lengths)
        lengths = windows.lengths[there]
        drafters = np.zeros(len(live.busy), np.int64)
        if (lengths > 1).any():  # else it is a round without drafts
            verified = live.verified[slots]
            drafters[slots[verified]] = np.where(lengths > 1, *codes)[verified]
        ends = firsts + lengths
        for i in drafted[which[there]].nonzero()[0].tolist():
            plan.wrote(live[int(slots[i])], windows.tokens[firsts[i] + 1 : ends[i]].tolist())
        part = Windows(slots, windows.starts[there], lengths, lengths, windows.tokens[rows], lengths - 1)
        among = np.isin(np.flatnonzero(rows), broken).nonzero()[0].tolist()
        yield Ran(part, scores.only(rows), among, drafters, goes_on=True)
    live_still = asked.windows.slots[live.busy[asked.windows.slots]]
    scheduler.trim(live_still)
