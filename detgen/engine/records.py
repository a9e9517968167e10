"""The acceptance logs of the live sequences, in columns that become `TokenRecord`s when a sequence ends."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from detgen.engine.request import Status, TokenRecord
from detgen.engine.stats import DraftCounts, DrafterStats

STATUSES: tuple[Status, ...] = get_args(Status)
CODES = {status: i for i, status in enumerate(STATUSES)}
NONE = -1  # in place of a token: none was committed or drafted

_ROOM = 1024  # entries to make room for at first
_LARGEST = np.finfo(np.float32).max


class Log:
    """Entries of all live sequences in the order in which they were written.

    Attributes:
        drafters: names of drafters; entries have indexes into this list.
    """

    _COLUMNS = (
        *((name, np.int64) for name in ("owner", "position", "round", "token", "drafted")),
        *((name, np.int8) for name in ("drafter", "status")),
        ("logprob", np.float32),
        ("margin", np.float64),
    )

    def __init__(self) -> None:
        self.drafters: list[str] = ["none"]
        self._columns = {name: np.empty(_ROOM, dtype) for name, dtype in self._COLUMNS}
        self._count = 0
        self._ended = 0  # entries of sequences that ended

    def drafter(self, name: str) -> int:
        """Return the index of a drafter's name."""
        if name not in self.drafters:
            self.drafters.append(name)
        return self.drafters.index(name)

    def write(self, **entries: np.ndarray) -> None:
        """Append entries, given as columns [n].

        Args:
            entries: owner (order of the sequence), position, round, token (NONE if it was rolled back), drafter,
                drafted (NONE if there was none), status (see CODES), logprob, and margin (inf for none).
        """
        n = len(entries["owner"])
        end = self._count + n
        if end > len(self._columns["owner"]):
            self._keep(slice(self._count), max(n, self._count))
        for name, column in entries.items():
            self._columns[name][self._count : end] = column
        self._count = end

    def take(self, owners: list[int]) -> list[tuple[list[TokenRecord], DraftCounts]]:
        """Remove and return the records and counts of finished sequences.

        Args:
            owners: the sequences' `order`.
        """
        owner = self._columns["owner"][: self._count]
        found = []
        for one in owners:
            mine = np.flatnonzero(owner == one)
            found.append((self._records(mine), self._counts(mine)))
            owner[mine] = NONE
            self._ended += len(mine)
        if self._ended > max(self._count // 2, _ROOM):
            self._compact()
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._count = self._ended = 0

    def _counts(self, at: np.ndarray) -> DraftCounts:
        """Return the counts of a sequence's entries by drafter, in order of first appearance."""
        drafter, status, of_round = (self._columns[name][at] for name in ("drafter", "status", "round"))
        begins = np.diff(of_round, prepend=NONE) != 0
        counts = DraftCounts()
        for code in dict.fromkeys(drafter.tolist()):
            own = drafter == code
            counts[self.drafters[code]] = count_statuses(status[own], int(begins[own].sum()))
        return counts

    def _records(self, at: np.ndarray) -> list[TokenRecord]:
        """Return a sequence's entries as records."""
        c = {name: column[at] for name, column in self._columns.items()}
        rolled_back = c["token"] == NONE
        columns = (
            c["position"].tolist(),
            c["round"].tolist(),
            _or_none(c["token"], rolled_back),
            map(self.drafters.__getitem__, c["drafter"].tolist()),
            _or_none(c["drafted"], c["drafted"] == NONE),
            map(STATUSES.__getitem__, c["status"].tolist()),
            _or_none(c["logprob"], rolled_back),
            _or_none(np.minimum(c["margin"], _LARGEST).astype(np.float32), rolled_back | np.isinf(c["margin"])),
        )
        return list(map(TokenRecord._make, zip(*columns, strict=True)))

    def _compact(self) -> None:
        """Drop the entries of finished sequences and free their memory."""
        kept = np.flatnonzero(self._columns["owner"][: self._count] != NONE)
        self._keep(kept, max(len(kept), _ROOM))
        self._count, self._ended = len(kept), 0

    def _keep(self, entries: np.ndarray | slice, room: int) -> None:
        """Keep these entries, and room for that many others."""
        self._columns = {
            name: np.concatenate([column[entries], np.empty(room, column.dtype)])
            for name, column in self._columns.items()
        }


def _or_none(values: np.ndarray, absent: np.ndarray) -> list[Any]:
    """Return the values, with None where they are absent."""
    found: list[Any] = values.tolist()
    for i in np.flatnonzero(absent).tolist():
        found[i] = None
    return found


def count_statuses(status: np.ndarray, rounds: int) -> DrafterStats:
    """Return the counts of one drafter's entries.

    Args:
        status: int8 [n], see CODES.
        rounds: number of rounds with these entries.
    """
    number = dict(zip(STATUSES, np.bincount(status, minlength=len(STATUSES)).tolist(), strict=True))
    return DrafterStats(
        rounds=rounds, drafted=number["accepted"] + number["corrected"] + number["rolled_back"], **number
    )
