"""Which request goes to which worker: longest first, and those that begin alike to the same worker.

The requests that are looked at are the next ones of the input, as many as `AHEAD`. A long one that is begun last would
keep its worker busy when all others have ended; prompts that begin alike are read once where one worker has them all.
Outputs do not depend on any of it.

What the coordinator knows of each worker, and what it counts of all of them, is here, too.
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

AHEAD = 1024  # requests that are looked at
_LONGEST_WAIT = 4 * AHEAD  # requests that go before one; AHEAD of them would be the order of the input
_CHARACTERS = 1 << 24  # or so many of their prompts, which need memory
_BEGINNING = 256  # characters, about the tokens of a page, by which prompts begin alike
_TOKENS = 64  # the same in tokens
_PER_TOKEN = 4  # characters
_TRIES = 16  # of the longest requests, when a worker looks for prompts that no other worker has


@dataclass(slots=True, eq=False)
class Errand:
    """A request on its way to a worker, or there.

    Attributes:
        request: the request.
        cost: tokens that it may take, prompt and samples together; an estimate.
        group: what prompts share that begin alike.
        size: characters of the prompt, or tokens.
        came: how many requests had gone when it came.
        delivered: samples that the coordinator has.
        deaths: workers that died while they had it.
        alone: those of them that had nothing else.
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
    """A request with an estimate of what it takes, and the beginning of its prompt."""
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
        requests: all of them; read as far ahead as is looked.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._exhausted = False
        self._size = 0
        self._errands: dict[int, Errand] = {}  # by the index of the request
        self._order: deque[int] = deque()  # indices as they came, of which some have gone
        self._longest: list[tuple[int, int]] = []  # a heap of (-cost, index), of which some have gone
        self._groups: dict[str, list[tuple[int, int]]] = {}  # such a heap for each
        self._current: dict[int, str] = {}  # the group that a worker is at
        self._served: Counter[str] = Counter()  # workers that are at a group
        self._again: deque[Errand] = deque()  # those that go before all others, for they were sent before
        self._gone = 0

    def __len__(self) -> int:
        """How many wait, of those that are looked at."""
        return len(self._errands) + len(self._again)

    def look_ahead(self) -> None:
        """Read on in the requests, as far as is looked."""
        while not self._exhausted and len(self._errands) < AHEAD and self._size < _CHARACTERS:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
            else:
                self.add(errand_of(request))

    def add(self, errand: Errand) -> None:
        """Let a request wait."""
        index = errand.request.index
        errand.came = self._gone
        self._errands[index] = errand
        self._order.append(index)
        self._size += errand.size
        entry = (-errand.cost, index)
        heappush(self._longest, entry)
        heappush(self._groups.setdefault(errand.group, []), entry)

    def put_back(self, errands: Iterable[Errand]) -> None:
        """Let requests that were taken go before all others."""
        self._again.extend(errands)

    def take(self, worker: int, samples: int) -> list[Errand]:
        """The requests that a worker gets now.

        Args:
            worker: its number.
            samples: that it has room for; the last request may have more.
        """
        taken: list[Errand] = []
        while samples > 0 and len(self):
            errand = self._again.popleft() if self._again else self._take(worker)
            taken.append(errand)
            samples -= errand.request.samples
        return taken

    def leave(self, worker: int) -> None:
        """A worker is no longer at the group that it was at."""
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
        """The longest that waits, of a heap; None if none does."""
        while heap and heap[0][1] not in self._errands:
            heappop(heap)
        return heap[0][1] if heap else None

    def _unserved(self) -> int:
        """The longest whose group no worker is at, if it is among the first ones; else the longest."""
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
        """Give memory back: of a group of which nothing waits, and of entries that have gone."""
        if self._longest_of(self._groups[group]) is None:
            del self._groups[group]
        if len(self._longest) > 2 * AHEAD + 2 * len(self._errands):
            self._longest = [(-e.cost, i) for i, e in self._errands.items()]
            heapify(self._longest)


@dataclass(slots=True, eq=False)
class Worker:
    """What the coordinator knows of a worker.

    Attributes:
        number: from 1, as people see it.
        identity: of its engine; None while it is not known, and it gets no work.
        calls: that are not answered.
        sent: requests that it has, by index.
        alone: whether it has one request that runs alone.
        behind: whether it may still generate samples that have come already, from a worker that died.
        stats: of its engine.
        before: of its engines that have died.
        deaths: since it was last ready.
        refused: whether it gets no more work for good.
        reason: why.
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
        """What messages call it."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")

    def forget(self) -> None:
        """It has to begin anew; nothing is known of what it does until then."""
        self.identity = None
        self.calls.clear()
        self.sent.clear()
        self.alone = self.behind = False

    def died(self) -> None:
        """Likewise, and with another engine."""
        self.forget()
        self.deaths += 1
        add_counts(self.before, self.stats)
        self.stats = EngineStats()


def add_counts(total: EngineStats, more: EngineStats) -> None:
    """Add counts to others; `live` belongs to the moment, and `workers` to none of them."""
    for one in fields(EngineStats):
        if one.name == "drafters":
            total.drafters.add(more.drafters)
        elif one.name not in ("live", "workers", "ready"):
            setattr(total, one.name, getattr(total, one.name) + getattr(more, one.name))
