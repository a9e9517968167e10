"""Prepares rounds of drafting and verifying that one call runs before the host sees the first, and takes their results.

What a device commits only decides what the next round of the call reads: the host verifies each round again, and writes
it to the log like a round of its own. Affects only speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from detgen.drafters.protocol import DraftPlan
from detgen.engine.pass_results import Ran
from detgen.engine.scheduler import Scheduler
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.rounds import Limits, Round, Rounds
from detgen.kernels.sampling import Choices

_SPARED = 16  # live sequences per one that may end before a call is over, while others wait for its slot


class Ahead(NamedTuple):
    """What a call of rounds may do.

    Attributes:
        plan: how sequences draft.
        counts: int64 [sequences that decode], most tokens that each drafts.
        most: maximum number of rounds.
    """

    plan: DraftPlan
    counts: np.ndarray
    most: int


def rounds_ahead(
    scheduler: Scheduler, windows: Windows, ahead: Ahead, choices: Callable[[Windows], Choices | None]
) -> Rounds:
    """Return the rounds to run.

    The chunks of prompts are those that single rounds would read. The call ends with the round in which a sequence
    finishes its prompt; that sequence decodes in the next call.

    Args:
        scheduler: has the live sequences.
        windows: the last token of each that decodes.
        ahead: what the call may do.
        choices: how the next token behind each window is chosen; None if all take their largest logit.
    """
    live, slots, (plan, counts, most) = scheduler.live, windows.slots, ahead
    length, limit = live.length[slots], live.limit[slots]
    most = most if plan.rounds is None else min(most, plan.rounds)
    if scheduler.waiting:
        lasting = np.sort(-(-(limit - length) // (1 + counts)))
        most = min(most, int(lasting[len(slots) // _SPARED]))
    chunks, begun, cached = list[list[Window]](), list[int](), live.cached.copy()
    rows, most = int((1 + counts).sum()), 1 if scheduler.expected else max(most, 1)
    while len(chunks) < most and not begun and (chunk := scheduler.chunks(scheduler.free(rows), rows, cached)):
        chunks.append(chunk)
        for window in chunk:
            cached[window.slot] += len(window.tokens)
        begun = [window.slot for window in chunk if window.logits]
    if begun:
        most, ones = len(chunks), np.ones(len(begun), np.int64)
        windows = windows.joined(Windows(np.array(begun), live.length[begun] - 1, ones, ones, live.last[begun]))
    room = length + scheduler.room(slots)
    endings = [live[slot].ending for slot in slots.tolist()]
    ending = np.full((len(slots), max(map(len, endings))), -1, np.int64)
    for i, tokens in enumerate(endings):
        ending[i, : len(tokens)] = sorted(tokens)
    reach = np.minimum(np.minimum(limit - 1, room), plan.context)
    limits = Limits(counts, reach, room, limit, live.prompt[slots] + live.least[slots], ending)
    prompts, reads, texts = live.prompt[windows.slots], Windows.of(plan.reads), None
    if plan.runner is None:
        texts = [
            live[slot].tokens if count else [] for slot, count in zip(slots.tolist(), counts.tolist(), strict=True)
        ]
    return Rounds(most, windows, prompts, chunks, limits, choices(windows), reads, plan.again, texts)


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
    live = scheduler.live
    for windows, which, scores, broken in rounds:
        there = live.busy[windows.slots]
        if not there.any():
            break
        decode = there[: len(which)].nonzero()[0]  # the others read
        slots, lengths = windows.slots[decode], windows.lengths[decode]
        firsts = (windows.lengths.cumsum() - windows.lengths)[decode]
        known = (live.length[slots] - 1 == windows.starts[decode]) & (live.last[slots] == windows.tokens[firsts])
        assert known.all(), "the device commits what the host does"
        drafters = np.zeros(len(live.busy), np.int64)
        if (lengths > 1).any():  # else it is a round without drafts
            verified = live.verified[slots]
            drafters[slots[verified]] = np.where(lengths > 1, *codes)[verified]
        ends = firsts + lengths
        for i in asked.limits.drafted[which[decode]].nonzero()[0].tolist():
            plan.wrote(live[int(slots[i])], windows.tokens[firsts[i] + 1 : ends[i]].tolist())
        rows = np.repeat(there, windows.lengths).nonzero()[0]
        among, scored = np.isin(rows, broken).nonzero()[0].tolist(), scores.only(np.repeat(there, windows.logits))
        yield Ran(windows.only(there), scored, among, drafters, goes_on=True)
    slots = asked.windows.slots
    scheduler.trim(slots[live.busy[slots]])
