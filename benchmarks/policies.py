"""Schedules to compare detgen's with: one that knows all lengths, and the equal slots that detgen had before pages.

Both count rounds alone: a round commits one token of each sequence that has read its prompt.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from lengths import Lengths

_BLOCK = 64  # slots are multiples of this, as the key lengths of passes are


class Outcome(NamedTuple):
    """What a schedule takes.

    Attributes:
        rounds: rounds until all sequences have ended.
        passes: passes in these.
        live: sequences that hold memory, on average over the rounds.
    """

    rounds: int
    passes: int
    live: float


def least_rounds(requests: Iterable[Lengths], batch: int, rows: int) -> int:
    """Rounds that no schedule can do without: for the batch, for the rows of the passes, for the longest request."""
    tokens = read = longest = 0
    for prompt, output, _ in requests:
        tokens += output
        read += prompt + output - 1
        longest = max(longest, math.ceil(prompt / rows) + output - 1)
    return max(math.ceil(tokens / batch), math.ceil(read / rows), longest)


def ideal(requests: Sequence[Lengths], batch: int, positions: int, rows: int, page: int = 1) -> Outcome:
    """The schedule of one who knows how long each output will be, and packs by that.

    A round is one pass. Each sequence that has read its prompt has one row in it; the other rows read prompts, in the
    order of admission. So the rounds in which an admitted request reads, decodes and ends are known when it is
    admitted (what comes later takes nothing from it), and with them the positions that it holds in each of these. A
    request is admitted in the first round that has room in the batch and, in every round until it ends, room for what
    it will hold then beside those admitted before: nothing is held back, nothing is preempted. In each round the
    waiting requests are tried in the order of the file, and those that fit pass those that do not.

    Args:
        requests: in the order of the file; none needs more than `positions`.
        batch: most sequences at a time.
        positions: of the KV cache.
        rows: most rows of a pass.
        page: positions are given out in multiples of this.
    """
    size = 1024
    free, used = np.full(size, rows), np.zeros(size, dtype=np.int64)  # by round: rows, positions
    ends: list[int] = []
    waiting = deque(requests)
    now = rounds = held = 0
    while waiting:
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        refused: list[Lengths] = []
        at = 0
        while len(ends) < batch and at < len(waiting):
            request = waiting[at]
            # What is larger both ways than one that does not fit holds more, for longer.
            if any(r.prompt <= request.prompt and r.output <= request.output for r in refused):
                at += 1
                continue
            while True:
                done = np.minimum(np.cumsum(free[now:]), request.prompt)
                reading = int(np.searchsorted(done, request.prompt)) + 1
                end = now + reading + request.output - 1
                if end < size:
                    break
                free, used = (np.pad(a, (0, size), constant_values=v) for a, v in ((free, rows), (used, 0)))
                size *= 2
            own = np.concatenate([done[:reading], request.prompt + np.arange(1, request.output)])
            own = -(-own // page) * page
            if (used[now:end] + own).max() > positions:
                refused.append(request)
                at += 1
                continue
            used[now:end] += own
            free[now : now + reading] -= np.diff(done[:reading], prepend=0)
            free[now + reading : end] -= 1
            heapq.heappush(ends, end)
            rounds = max(rounds, end)
            held += end - now
            del waiting[at]
        now += 1
    return Outcome(rounds, rounds, held / rounds)


def equal_slots(requests: Iterable[Lengths], batch: int, positions: int, rows: int, context: int) -> Outcome:
    """What detgen did before it had pages.

    The KV buffers are cut into slots of the size of the longest of the next two batches, prompt and `max_tokens`
    together, or, where those would be fewer than the batch, of the first request's. Requests are admitted in order;
    one that does not fit a slot waits until no sequence is live, for then the buffers are cut anew. A round reads the
    prompts of all that were admitted, in as many passes as that takes.

    Args:
        requests: in the order of the file.
        batch: most sequences at a time.
        positions: of the KV cache.
        rows: most rows of a pass.
        context: of the model; no sequence grows beyond it.
    """
    source = iter(requests)
    waiting: deque[tuple[Lengths, int]] = deque()
    ends: list[int] = []
    slots = size = rounds = passes = held = 0
    while True:
        while len(waiting) < 2 * batch and (request := next(source, None)) is not None:
            waiting.append((request, min(request.prompt + request.most, context)))
        if not ends:
            if not waiting:
                return Outcome(rounds, passes, held / max(rounds, 1))
            wanted = _whole_blocks(max(limit for _, limit in waiting))
            if positions // wanted < min(batch, len(waiting)):
                wanted = _whole_blocks(waiting[0][1])
            fitting = max(min(batch, positions // wanted), 1)
            if size < wanted or slots < fitting:
                size, slots = wanted, fitting
        row_count = len(ends)
        while waiting and len(ends) < slots and waiting[0][1] <= size:
            request, _ = waiting.popleft()
            row_count += request.prompt
            heapq.heappush(ends, rounds + request.output)
        held += len(ends)
        passes += -(-row_count // rows)
        rounds += 1
        while ends and ends[0] <= rounds:
            heapq.heappop(ends)


def _whole_blocks(limit: int) -> int:
    return -(-limit // _BLOCK) * _BLOCK
