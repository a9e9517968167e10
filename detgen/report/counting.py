"""Counts over the acceptance log of a whole run, in constant memory.

Only margins of verified tokens are counted; nothing is promised for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.report.log import NAMES, NONE, STATUSES, Entries
from detgen.report.streaming import Fields

DEPTHS = 32  # places in a draft that are counted separately; the last includes all later ones
MOST_COMMITTED = 32  # tokens of a round; the last includes all larger numbers
STRETCH, STRETCHES = 16, 256  # tokens of a completion whose rounds are counted together; number of such stretches
LOWEST, HALVES = -6, 16  # margins are counted by half powers of ten, from 10**LOWEST on
THRESHOLDS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_CLOSEST = 20

_ACCEPTED, _CORRECTED, _ROLLED_BACK, _UNVERIFIED = (
    STATUSES.index(status) for status in ("accepted", "corrected", "rolled_back", "unverified")
)
_Counts = np.ndarray


def _zeros(*shape: int) -> _Counts:
    return np.zeros(shape, np.int64)


@dataclass(slots=True)
class Counts:
    """Counts of entries.

    Attributes:
        samples: samples with at least one entry.
        statuses: int64 [drafters, statuses].
        rounds: int64 [drafters].
        depths: int64 [drafters, DEPTHS, statuses], by place in the draft.
        committed: int64 [drafters, MOST_COMMITTED + 1], rounds by number of committed tokens.
        stretches: int64 [STRETCHES, 2], rounds that begin in a stretch of the completion, and their committed tokens.
        margins: int64 [HALVES], tokens by their margin.
        ties: tokens whose margin is 0.
        alone: tokens without another candidate.
        near: int64 [thresholds], tokens whose margin is below the threshold.
        near_samples: int64 [thresholds], samples that have such a token.
        closest: entries with the smallest margins, ascending.
    """

    samples: int = 0
    statuses: _Counts = field(default_factory=lambda: _zeros(len(NAMES), len(STATUSES)))
    rounds: _Counts = field(default_factory=lambda: _zeros(len(NAMES)))
    depths: _Counts = field(default_factory=lambda: _zeros(len(NAMES), DEPTHS, len(STATUSES)))
    committed: _Counts = field(default_factory=lambda: _zeros(len(NAMES), MOST_COMMITTED + 1))
    stretches: _Counts = field(default_factory=lambda: _zeros(STRETCHES, 2))
    margins: _Counts = field(default_factory=lambda: _zeros(HALVES))
    ties: int = 0
    alone: int = 0
    near: _Counts = field(default_factory=lambda: _zeros(len(THRESHOLDS)))
    near_samples: _Counts = field(default_factory=lambda: _zeros(len(THRESHOLDS)))
    closest: list[Fields] = field(default_factory=list)

    def add(self, entries: Entries) -> None:
        """Count the entries of some samples."""
        e = entries
        self.samples += len(e.samples)
        kinds = e.drafter * len(STATUSES) + e.status
        _count(self.statuses, kinds)
        depth = np.minimum(e.depth, DEPTHS - 1)
        _count(self.depths, (e.drafter * DEPTHS + depth) * len(STATUSES) + e.status)

        drafter = e.drafter[e.rounds]
        committed = np.add.reduceat((e.token != NONE).astype(np.int64), e.rounds)
        _count(self.rounds, drafter)
        width = MOST_COMMITTED + 1
        _count(self.committed, drafter * width + np.minimum(committed, MOST_COMMITTED))
        stretch = np.minimum(e.position[e.rounds] // STRETCH, STRETCHES - 1)
        self.stretches[:, 0] += np.bincount(stretch, minlength=STRETCHES)
        self.stretches[:, 1] += np.bincount(stretch, committed, minlength=STRETCHES).astype(np.int64)
        self._add_margins(e)

    def _add_margins(self, e: Entries) -> None:
        judged = (e.token != NONE) & (e.status != _UNVERIFIED)
        margin = np.where(judged, e.margin, np.nan)
        known = np.flatnonzero(~np.isnan(margin))
        self.alone += int(judged.sum()) - len(known)
        values = margin[known]
        zero = values <= 0
        self.ties += int(zero.sum())
        halves = np.floor((np.log10(values[~zero]) - LOWEST) * 2).astype(np.int64)
        _count(self.margins, np.clip(halves, 0, HALVES - 1))
        least = least_margins(e, margin)
        for i, threshold in enumerate(THRESHOLDS):
            self.near[i] += int((values < threshold).sum())
            self.near_samples[i] += int((least < threshold).sum())
        if len(known):
            most = min(_CLOSEST, len(known)) - 1
            bound = np.partition(values, most)[most]
            found = [e.record(i) for i in known[values <= bound][: 4 * _CLOSEST].tolist()]
            self.closest = sorted(self.closest + found, key=lambda record: record["margin"])[:_CLOSEST]

    def drafts(self) -> DraftCounts:
        """Return the counts by drafter as a run counts them, for drafters that occur."""
        found = DraftCounts()
        for i in np.flatnonzero(self.rounds).tolist():
            number = dict(zip(STATUSES, self.statuses[i].tolist(), strict=True))
            drafted = number["accepted"] + number["corrected"] + number["rolled_back"]
            found[NAMES[i]] = DrafterStats(rounds=int(self.rounds[i]), drafted=drafted, **number)
        return found

    def verified(self) -> tuple[int, int]:
        """Return the number of verified rounds, and of the tokens that they committed."""
        total = self.drafts().total()
        return total.rounds - total.unverified, total.accepted + total.corrected + total.bonus + total.plain

    def by_depth(self) -> dict[str, list[tuple[int, int]]]:
        """Return, for each drafter that drafted, the tokens drafted and accepted at each place in the draft."""
        found = {}
        for i, name in enumerate(NAMES):
            accepted = self.depths[i, :, _ACCEPTED]
            drafted = accepted + self.depths[i, :, _CORRECTED] + self.depths[i, :, _ROLLED_BACK]
            last = np.flatnonzero(drafted)
            if len(last):
                end = int(last[-1]) + 1
                found[name] = list(zip(drafted[:end].tolist(), accepted[:end].tolist(), strict=True))
        return found


def least_margins(e: Entries, margin: np.ndarray | None = None) -> np.ndarray:
    """Return the smallest margin of each sample's verified tokens, float64 [samples]; nan if none is known."""
    if margin is None:
        margin = np.where((e.token != NONE) & (e.status != _UNVERIFIED), e.margin, np.nan)
    found: np.ndarray = np.fmin.reduceat(margin, e.samples)
    return found


def thrown_away(e: Entries) -> np.ndarray:
    """Return how many drafted tokens of each sample were not accepted, int64 [samples]."""
    wrong = (e.status == _CORRECTED) | (e.status == _ROLLED_BACK)
    found: np.ndarray = np.add.reduceat(wrong.astype(np.int64), e.samples)
    return found


def longest_accepted(e: Entries) -> np.ndarray:
    """Return the most drafted tokens accepted in one round, int64 [samples]."""
    depth = np.where(e.status == _ACCEPTED, e.depth + 1, 0)
    found: np.ndarray = np.maximum.reduceat(depth, e.samples)
    return found


def _count(into: _Counts, codes: np.ndarray) -> None:
    """Add the number of occurrences of each flat index to a table."""
    into += np.bincount(codes, minlength=into.size).reshape(into.shape)
