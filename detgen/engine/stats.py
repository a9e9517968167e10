"""Counters of one engine: what was drafted, verified and rolled back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from detgen.engine.request import TokenRecord


@dataclass(slots=True)
class DrafterStats:
    """Counts of one drafter. drafted = accepted + corrected + rolled_back."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    corrected: int = 0
    bonus: int = 0
    plain: int = 0
    rolled_back: int = 0
    unverified: int = 0

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(slots=True)
class EngineStats:
    """Running totals, read by progress displays at any time.

    Attributes:
        tokens: committed tokens.
        prompt_tokens: prompt tokens read by canonical passes (tokens reused from a shared prefix not counted).
        reused_tokens: prompt tokens whose KV entries were copied from another slot.
        target_passes: canonical passes.
        rows: rows of the canonical passes, padding included.
        padding_rows: rows that carried no token.
        fast_passes: passes of the target's fast path.
        draft_passes: passes of the draft model.
        live: requests that hold a slot now.
        peak_live: most of them at a time.
        drafters: counts by drafter name.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    target_passes: int = 0
    rows: int = 0
    padding_rows: int = 0
    fast_passes: int = 0
    draft_passes: int = 0
    live: int = 0
    peak_live: int = 0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)

    def of(self, drafter: str) -> DrafterStats:
        """The counts of one drafter, made on first use."""
        if drafter not in self.drafters:
            self.drafters[drafter] = DrafterStats()
        return self.drafters[drafter]

    def total(self) -> DrafterStats:
        """The counts of all drafters together."""
        parts = self.drafters.values()
        return DrafterStats(**{name: sum(getattr(p, name) for p in parts) for name in DrafterStats.__slots__})


def count_records(records: list[TokenRecord] | tuple[TokenRecord, ...]) -> dict[str, DrafterStats]:
    """The counts by drafter that one sample's acceptance log adds up to."""
    rounds = {(r.drafter, r.round) for r in records}
    drafters: dict[str, DrafterStats] = {}
    for drafter, n in Counter(d for d, _ in rounds).items():
        drafters[drafter] = DrafterStats(rounds=n)
    for r in records:
        stats = drafters[r.drafter]
        stats.drafted += r.drafted is not None
        setattr(stats, r.status, getattr(stats, r.status) + 1)
    return drafters
