"""An engine's counters: tokens drafted, verified and rolled back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class DrafterStats:
    """Token counts of one drafter: drafted = accepted + corrected + rolled_back."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    corrected: int = 0
    bonus: int = 0
    plain: int = 0
    rolled_back: int = 0
    unverified: int = 0

    def add(self, other: DrafterStats) -> None:
        """Add the counts of `other`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the draft tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


class DraftCounts(dict[str, DrafterStats]):
    """Counts by drafter name; a drafter's counts are created on first use."""

    def __missing__(self, drafter: str) -> DrafterStats:
        return self.setdefault(drafter, DrafterStats())

    def add(self, other: Mapping[str, DrafterStats]) -> None:
        """Add the counts of `other`, drafter by drafter."""
        for name, stats in other.items():
            self[name].add(stats)

    def total(self) -> DrafterStats:
        """Return the sum over all drafters."""
        total = DrafterStats()
        for stats in self.values():
            total.add(stats)
        return total


@dataclass(slots=True)
class EngineStats:
    """Running totals, read by progress displays at any time.

    Attributes:
        tokens: committed tokens.
        prompt_tokens: tokens of prompts read by canonical passes, and tokens read again after a preemption, without
            those that were in the prefix cache.
        reused_tokens: tokens whose KV entries were in the prefix cache.
        preemptions: how often a sequence gave its pages back, to be read again later.
        target_passes: canonical passes.
        rows: rows of the canonical passes.
        draft_passes: passes that drafted.
        live: sequences that hold a slot now.
        peak_live: largest number of these at a time.
        drafters: counts by drafter name.
        thoughts: thoughts written; this and the next three count for models that think while they read, else 0.
        chunks: full chunks read.
        prefill_rounds: parts of prompts that canonical passes read, one per sequence and pass.
        passes_saved: further chunks read in these passes; reading chunk by chunk would take as many more passes.
        workers: processes that generate for this engine; 0 if it generates itself.
        ready: workers that generate now; the others are starting.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    target_passes: int = 0
    rows: int = 0
    draft_passes: int = 0
    live: int = 0
    peak_live: int = 0
    drafters: DraftCounts = field(default_factory=DraftCounts)
    thoughts: int = 0
    chunks: int = 0
    prefill_rounds: int = 0
    passes_saved: int = 0
    workers: int = 0
    ready: int = 0
