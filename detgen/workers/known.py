"""What the coordinator knows of a worker, and what it counts of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from detgen.engine.stats import EngineStats
from detgen.workers.serving import Identity
from detgen.workers.waiting import Errand


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
