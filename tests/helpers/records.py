"""What acceptance logs add up to, counted record by record."""

from __future__ import annotations

from collections.abc import Iterable

from detgen.engine.request import TokenRecord
from detgen.engine.stats import DraftCounts


def count_records(records: Iterable[TokenRecord]) -> DraftCounts:
    """The counts by drafter of one sample's log."""
    counts, rounds = DraftCounts(), set()
    for r in records:
        stats = counts[r.drafter]
        stats.rounds += (r.drafter, r.round) not in rounds
        rounds.add((r.drafter, r.round))
        stats.drafted += r.drafted is not None
        setattr(stats, r.status, getattr(stats, r.status) + 1)
    return counts
