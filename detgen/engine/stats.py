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
        """The counts of all drafters together."""
        total = DrafterStats()
        for stats in self.values():
            total.add(stats)
        return total


@dataclass(slots=True)
class EngineStats:
    """Running totals, read by progress displays at any time.

    Attributes:
        tokens: committed tokens.
        prompt_tokens: tokens of prompts read by canonical passes, and those read again after a preemption; not those
            that the prefix cache had.
        reused_tokens: tokens whose KV entries the prefix cache had.
        preemptions: how often a sequence gave its pages back, to be read again later.
        target_passes: canonical passes.
        rows: rows of the canonical passes.
        draft_passes: passes that drafted.
        live: sequences that hold a slot now.
        peak_live: most of them at a time.
        drafters: counts by drafter name.
        thoughts: thoughts written; this and the next three are of models that think while they read, else 0.
        chunks: full chunks read.
        prefill_rounds: parts of prompts that canonical passes read, one for each sequence and pass.
        passes_saved: further chunks that such passes read: reading chunk by chunk takes so many passes more.
        workers: processes that generate for this one; 0 where it does so itself.
        ready: those of them that do so now; the others are being started.
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
