"""Chooses which request goes to which worker: longest first, and prompts with the same beginning to the same worker.

Only the next `AHEAD` requests of the input are considered. A long request that begins last would keep its worker busy
after all others have ended; a common beginning of prompts is read once if one worker has them all. Outputs do not
depend on any of it.

The coordinator's records of workers, and the sums of their counts, are here, too.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from heapq import heapify, heappop, heappush
from typing import Any

from detgen.engine.request import Request
from detgen.engine.score_requests import ScoreRequest
from detgen.engine.stats import EngineStats
from detgen.workers.serving import Identity

AHEAD = 1024  # requests to look ahead
_LONGEST_WAIT = 4 * AHEAD  # requests that may overtake one; with AHEAD, the order would be that of the input
_CHARACTERS = 1 << 24  # the look-ahead also ends at this many characters of prompts, which need memory
_BEGINNING = 256  # characters that prompts of a group share, about the tokens of a page
_TOKENS = 64  # the same in tokens
_PER_TOKEN = 4  # characters
_TRIES = 16  # longest requests to try when a worker looks for prompts of a group that no other worker has


@dataclass(slots=True, eq=False)
class Errand:
    """A request that waits for a worker, or that one has.

    Attributes:
        request: the request.
        cost: estimate of the tokens that it takes, prompt and samples together.
        group: beginning of the prompt, the same for all prompts of a group.
        size: characters of the prompt, or tokens.
        came: number of requests taken before it came.
        delivered: samples that the coordinator has.
        deaths: number of workers that died while they had it.
        alone: number of those that had nothing else.
    """

    request: Request
    cost: int
    group: str
    size: int
    came: int = 0
    delivered: set[int] = field(default_factory=set)
    deaths: int = 0
    alone: int = 0


def errand_of(request: Request) -> Errand:
    """Make the errand of a request, with an estimate of its cost and the beginning of its prompt."""
    if request.token_ids is not None:
        tokens = size = len(request.token_ids)
        group = ",".join(map(str, request.token_ids[:_TOKENS]))
    else:
        text = request.prompt
        if text is None:
            text = json.dumps([request.tools, request.messages])
        size, group = len(text), text[:_BEGINNING]
        tokens = size // _PER_TOKEN
    if isinstance(request, ScoreRequest):
        behind = sum(map(len, request.completions or ()))
        return Errand(request, tokens + behind, group, size + behind)
    return Errand(request, tokens + request.samples * request.params.max_tokens, group, size)


class Waiting:
    """The requests that wait for a worker.

    Args:
        requests: all requests; read only as far ahead as needed.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._exhausted = False
        self._size = 0
        self._errands: dict[int, Errand] = {}  # by the index of the request
        self._order: deque[int] = deque()  # indices in order of arrival; some may have been taken
        self._longest: list[tuple[int, int]] = []  # a heap of (-cost, index); some may have been taken
        self._groups: dict[str, list[tuple[int, int]]] = {}  # such a heap per group
        self._current: dict[int, str] = {}  # the current group of each worker
        self._served: Counter[str] = Counter()  # number of workers whose current group it is
        self._again: deque[Errand] = deque()  # requests that were sent before and go first
        self._gone = 0

    def __len__(self) -> int:
        """Return how many requests wait, of those read so far."""
        return len(self._errands) + len(self._again)

    def look_ahead(self) -> None:
        """Read requests up to the limits of the look-ahead."""
        while not self._exhausted and len(self._errands) < AHEAD and self._size < _CHARACTERS:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
            else:
                self.add(errand_of(request))

    def add(self, errand: Errand) -> None:
        """Add a request."""
        index = errand.request.index
        errand.came = self._gone
        self._errands[index] = errand
        self._order.append(index)
        self._size += errand.size
        entry = (-errand.cost, index)
        heappush(self._longest, entry)
        heappush(self._groups.setdefault(errand.group, []), entry)

    def put_back(self, errands: Iterable[Errand]) -> None:
        """Put back requests that were taken; they go before all others."""
        self._again.extend(errands)

    def take(self, worker: int, samples: int) -> list[Errand]:
        """Take the requests that a worker gets now.

        Args:
            worker: number of the worker.
            samples: number of samples that it has room for; the last request may have more.
        """
        taken: list[Errand] = []
        while samples > 0 and len(self):
            errand = self._again.popleft() if self._again else self._take(worker)
            taken.append(errand)
            samples -= errand.request.samples
        return taken

    def leave(self, worker: int) -> None:
        """Note that a worker has left its current group."""
        group = self._current.pop(worker, None)
        if group is not None:
            self._served[group] -= 1
            if not self._served[group]:
                del self._served[group]

    def _take(self, worker: int) -> Errand:
        while self._order[0] not in self._errands:
            self._order.popleft()
        first = self._order[0]
        if self._gone - self._errands[first].came >= _LONGEST_WAIT:
            return self._remove(first, worker)
        index = self._longest_of(self._groups.get(self._current.get(worker, ""), []))
        return self._remove(self._unserved() if index is None else index, worker)

    def _longest_of(self, heap: list[tuple[int, int]]) -> int | None:
        """Return the longest request of a heap that still waits; None if there is none."""
        while heap and heap[0][1] not in self._errands:
            heappop(heap)
        return heap[0][1] if heap else None

    def _unserved(self) -> int:
        """Return the longest request whose group no worker has, if among the first few; else the longest."""
        looked: list[tuple[int, int]] = []
        found = longest = self._longest_of(self._longest)
        assert longest is not None
        while len(looked) < _TRIES and (index := self._longest_of(self._longest)) is not None:
            if not self._served[self._errands[index].group]:
                found = index
                break
            looked.append(heappop(self._longest))
        for entry in looked:
            heappush(self._longest, entry)
        assert found is not None
        return found

    def _remove(self, index: int, worker: int) -> Errand:
        errand = self._errands.pop(index)
        self._size -= errand.size
        self._gone += 1
        if self._current.get(worker) != errand.group:
            self.leave(worker)
            self._current[worker] = errand.group
            self._served[errand.group] += 1
        self._forget(errand.group)
        return errand

    def _forget(self, group: str) -> None:
        """Free memory: a group of which nothing waits, and heap entries of requests that were taken."""
        if self._longest_of(self._groups[group]) is None:
            del self._groups[group]
        if len(self._longest) > 2 * AHEAD + 2 * len(self._errands):
            self._longest = [(-e.cost, i) for i, e in self._errands.items()]
            heapify(self._longest)


@dataclass(slots=True, eq=False)
class Worker:
    """The coordinator's record of a worker.

    Attributes:
        number: number of the worker from 1, as shown to users.
        identity: description of its engine; None while it is unknown, and the worker gets no work.
        calls: calls that are not answered.
        sent: requests that it has, by index.
        alone: whether it has one request that runs alone.
        behind: whether it may still generate samples that a worker that died had already delivered.
        stats: counts of its engine.
        before: counts of its engines that have died.
        deaths: number of deaths since it was last ready.
        refused: whether it gets no more work for good.
        reason: why it was refused.
        node: name of its machine, if it ever was ready.
    """

    number: int
    identity: Identity | None = None
    calls: list[Any] = field(default_factory=list)
    sent: dict[int, Errand] = field(default_factory=dict)
    alone: bool = False
    behind: bool = False
    stats: EngineStats = field(default_factory=EngineStats)
    before: EngineStats = field(default_factory=EngineStats)
    deaths: int = 0
    refused: bool = False
    reason: str = ""
    node: str = ""

    @property
    def name(self) -> str:
        """The worker's name in messages."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")

    def forget(self) -> None:
        """Have the worker begin anew; until then, nothing is known of what it does."""
        self.identity = None
        self.calls.clear()
        self.sent.clear()
        self.alone = self.behind = False

    def died(self) -> None:
        """Note that the worker died: it begins anew with another engine."""
        self.forget()
        self.deaths += 1
        add_counts(self.before, self.stats)
        self.stats = EngineStats()


def add_counts(total: EngineStats, more: EngineStats) -> None:
    """Add counts to others, except `live`, `ready` and `workers`, which describe the present."""
    for one in fields(EngineStats):
        if one.name == "drafters":
            total.drafters.add(more.drafters)
        elif one.name not in ("live", "workers", "ready"):
            setattr(total, one.name, getattr(total, one.name) + getattr(more, one.name))
