"""What is whole in a damaged store, copied to a new one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from detgen.errors import StoreError
from detgen.outputs.entries import Entry, sound
from detgen.outputs.store import Store

_STEP = 256  # entries that are read at a time, while none is damaged
_LEAST = 100  # bytes of an entry, at most
_MOST = 1 << 28  # entries; a number that is larger is damage, too


def salvage(damaged: Path, into: Path) -> tuple[int, int | None]:
    """Copy all entries that are whole, by their own digests.

    Args:
        damaged: the database, which is read as far as it can be.
        into: the new one.

    Returns:
        How many there are, and how many are not whole; None if that is unknown.

    Raises:
        StoreError: the new one cannot be written.
    """
    kept = 0
    with closing(Store(into, lone=True)) as store, closing(sqlite3.connect(damaged, timeout=5)) as db:
        db.text_factory = lambda data: data.decode(errors="replace")
        with suppress(sqlite3.Error):
            db.execute("PRAGMA writable_schema = ON")  # else SQLite reads nothing of a file that was cut
        last, count = (_number(db, f"SELECT {what} FROM entries") for what in ("max(id)", "count(*)"))
        owners = _profiles(db)
        for rows in _rows(db, damaged.stat().st_size // _LEAST if last is None else min(last, _MOST)):
            by_owner: dict[int, list[Entry]] = {}
            for key, place, profile, tokens, value in rows:
                if (data := sound(key, value)) is not None and type(place) is int and type(tokens) is int:
                    by_owner.setdefault(profile, []).append(Entry(key, tokens, data, place))
            for profile, entries in by_owner.items():
                kept += len(store.add(*owners.get(profile, ("00" * 16, "unknown")), entries))
        with suppress(StoreError):
            store.checkpoint()
    return kept, None if count is None else count - kept


def _number(db: sqlite3.Connection, query: str) -> int | None:
    with suppress(sqlite3.Error, TypeError):
        return int(db.execute(query).fetchone()[0])
    return None


def _profiles(db: sqlite3.Connection) -> dict[int, tuple[str, str]]:
    with suppress(sqlite3.Error, AttributeError):
        found = db.execute("SELECT id, digest, model FROM profiles").fetchall()
        return {number: (digest.hex(), str(model)) for number, digest, model in found}
    return {}


def _rows(db: sqlite3.Connection, last: int) -> Iterator[list[tuple[Any, ...]]]:
    """The rows up to this one that can be read."""
    query = (
        "SELECT key, place, profile, tokens, value FROM entries JOIN packed USING (id) WHERE entries.id BETWEEN ? AND ?"
    )
    for start in range(1, last + 1, _STEP):
        waiting = [(start, min(start + _STEP - 1, last))]
        while waiting:
            low, high = waiting.pop()
            try:
                yield db.execute(query, (low, high)).fetchall()
            except sqlite3.Error:
                if low < high:
                    middle = (low + high) // 2
                    waiting += [(middle + 1, high), (low, middle)]
