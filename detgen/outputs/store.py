"""The database of finished samples, in a run's folder or shared by runs.

Nothing in it is trusted: an entry counts only if a digest over its key and value matches. A process may be killed at
any moment. On a local disk the database is in WAL mode, so readers and the writer of a shared one do not wait for each
other; on a network file system, where WAL has no shared memory, it has a rollback journal.
"""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import detgen
from detgen.errors import StoreError
from detgen.machine import no_file_left, on_network
from detgen.outputs.identity import Entry, digest, sound

STORE = "samples.sqlite3"  # in a run's folder, and in that of `--cache`

_APPLICATION = 0x64746763  # "dtgc"
_SCHEMA = 2
_PATIENCE = 5.0  # seconds to wait for another process that writes
_USE_SECONDS = 3600  # precision of the time of last use

# Values have a table of their own, so that queries over all entries read little.
_TABLES = (
    "CREATE TABLE profiles (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, model TEXT NOT NULL,"
    " version TEXT NOT NULL)",
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, key BLOB NOT NULL, place INTEGER NOT NULL,"
    " profile INTEGER NOT NULL, tokens INTEGER NOT NULL, used INTEGER NOT NULL)",
    "CREATE INDEX keys ON entries (key)",
    "CREATE TABLE packed (id INTEGER PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE engines (stamp BLOB PRIMARY KEY, value BLOB NOT NULL)",
)
_FIND = (
    "SELECT entries.id, used, value FROM entries LEFT JOIN packed USING (id) WHERE key = ? AND entries.id <= ?"
    " ORDER BY place = ? DESC, entries.id"
)


class Store:
    """The database of samples; opened, and created if it does not exist.

    Args:
        path: path of the database.
        lone: only this process uses it, and what was added is durable. It may have several entries with one key, from
            identical requests. In a shared store the first entry stays the only one, and a power cut may lose the last
            ones.
        say: is told on closing how many entries were found to be damaged.

    Attributes:
        path: path of the database.
        damaged: number of entries found to be damaged; `add` removes them.
        until: last entry that `find` may return.

    Raises:
        StoreError: by every method, if the database cannot be used; the message gives path, reason and remedy.
    """

    def __init__(self, path: Path, *, lone: bool = False, say: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.damaged = 0
        self.until = 2**63 - 1
        self._lone, self._say = lone, say
        self._damaged: list[tuple[int, bytes]] = []
        self._used: list[int] = []
        self.open()

    def open(self) -> None:
        """Open the database at the path, also again after it was replaced."""
        for place in (self.path, *(self.path.with_name(name) for name in beside(self.path.name))):
            # SQLite would block on a pipe, and create the target of a dangling link.
            if not _is_file_or_free(place):
                raise StoreError(f"{place} is not a file, so it cannot be a store of detgen; name another folder")
        with self.watched():
            uri = f"file:{quote(str(self.path.absolute()))}"
            self.db = sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)
        try:
            with self.watched():
                self._prepare()
        except BaseException:
            self.db.close()
            raise

    def close(self) -> None:
        """Record which entries were used, if possible, and close the database."""
        with suppress(StoreError):
            self._note_uses()
        with suppress(sqlite3.Error):
            self.db.close()
        if self.damaged:
            entries = "1 sample was" if self.damaged == 1 else f"{self.damaged:,} samples were"
            self._say(f"{self.path}: {entries} damaged, and generated again")

    def find(self, key: bytes, place: int = 0) -> tuple[int, bytes] | None:
        """Return an entry with this key, and its value; None if there is none, or it is damaged.

        Args:
            key: key of the entry.
            place: the entry of this place is preferred if there are several.
        """
        with self.watched():
            rows = self.db.execute(_FIND, (key, self.until, place)).fetchall()
        for entry, used, value in rows:
            if (found := sound(key, value)) is not None:
                if not self._lone and (not isinstance(used, int) or used < time.time() - _USE_SECONDS):
                    self._used.append(entry)
                return entry, found
            self.damaged += 1
            self._damaged.append((entry, key))
        return None

    def has(self, key: bytes) -> bool:
        """Return whether there is an entry, damaged or not."""
        with self.watched():
            return self.db.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None

    def read(self, entry: int) -> bytes | None:
        """Return the value of an entry; None if it is gone or damaged."""
        query = "SELECT key, value FROM entries LEFT JOIN packed USING (id) WHERE entries.id = ?"
        with self.watched():
            row = self.db.execute(query, (entry,)).fetchone()
        return None if row is None else sound(*row)

    def add(self, profile: str, model: str, new: Iterable[Entry]) -> list[int]:
        """Store samples, all of them or, on an error, none; return their entries.

        Args:
            profile: `profile_digest`.
            model: name of the model.
            new: the samples.
        """
        with self.writing():
            for entry, key in self._damaged:
                if self.db.execute("DELETE FROM entries WHERE id = ? AND key = ?", (entry, key)).rowcount:
                    self.db.execute("DELETE FROM packed WHERE id = ?", (entry,))
            owner = self._profile(profile, model)
            entries = [self._insert(each, owner) for each in new]
        self._damaged.clear()
        self._note_uses(least=1000)
        return entries

    def describe(self, stamp: str, value: bytes) -> None:
        """Store the description of an engine under the stamp of its configuration."""
        key = bytes.fromhex(stamp)
        with self.writing():
            self.db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (key, digest(key, value) + value))

    def described(self, stamp: str) -> bytes | None:
        """Return the description stored under a stamp; None if there is none, or it is damaged."""
        with self.watched():
            row = self.db.execute("SELECT value FROM engines WHERE stamp = ?", (bytes.fromhex(stamp),)).fetchone()
        return None if row is None else sound(bytes.fromhex(stamp), row[0])

    def count(self) -> int:
        """Return the number of samples."""
        return self._number("SELECT count(*) FROM entries")

    def last(self) -> int:
        """Return the last entry; 0 if there is none."""
        return self._number("SELECT coalesce(max(id), 0) FROM entries")

    def pragma(self, name: str) -> int:
        """Return the value of a numeric pragma."""
        return self._number(f"PRAGMA {name}")

    def check(self) -> None:
        """Read the whole database; `StoreError.damaged` if its structure is. Entries are checked when they are read."""
        with self.watched():
            (found,) = self.db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self.failed(StoreError(f"cannot use {self.path}: {found}; delete it", True))

    def checkpoint(self) -> None:
        """Bring all that was written into the database file itself."""
        with self.watched():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the block as one transaction."""
        with self.watched():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn SQLite's errors into messages that give the file, the reason and the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_NOTADB":
                message = f"{self.path} is not a store of detgen; name another folder, or move it"
                raise self.failed(StoreError(message, True)) from None
            remedy = next((what for start, what in _REMEDIES if name.startswith(start)), None)
            words = remedy or ("delete it" if name else "name another folder")
            failed = StoreError(f"cannot use {self.path}: {error}; {words}", bool(name) and remedy is None)
            raise self.failed(failed) from (no_file_left() or error)

    def failed(self, error: StoreError) -> Exception:
        """Return the exception to raise for an error of the database."""
        return error

    def _insert(self, new: Entry, profile: int) -> int:
        if not self._lone:
            there = self.db.execute("SELECT id FROM entries WHERE key = ?", (new.key,)).fetchone()
            if there is not None:
                return int(there[0])
        entry = self.db.execute(
            "INSERT INTO entries (key, place, profile, tokens, used) VALUES (?, ?, ?, ?, ?)",
            (new.key, new.place, profile, new.tokens, int(time.time())),
        ).lastrowid
        value = digest(new.key, new.value) + new.value
        self.db.execute("INSERT OR REPLACE INTO packed VALUES (?, ?)", (entry, value))
        return int(entry or 0)

    def _profile(self, digest: str, model: str) -> int:
        known = (bytes.fromhex(digest), model, detgen.__version__)
        self.db.execute("INSERT OR IGNORE INTO profiles (digest, model, version) VALUES (?, ?, ?)", known)
        return int(self.db.execute("SELECT id FROM profiles WHERE digest = ?", known[:1]).fetchone()[0])

    def _note_uses(self, least: int = 1) -> None:
        """Record the time of use of the entries that were found, if there are at least `least`."""
        if len(self._used) < least:
            return
        used, self._used = self._used, []
        with self.writing():
            now = int(time.time())
            self.db.executemany("UPDATE entries SET used = ? WHERE id = ?", [(now, each) for each in used])

    def _prepare(self) -> None:
        self.db.text_factory = lambda data: data.decode(errors="replace")  # damaged bytes may not be UTF-8
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", f"synchronous = {_SYNCHRONOUS[self._lone]}"):
            self.db.execute(f"PRAGMA {setting}")
        if self._lone:  # before anything is read: then no memory is shared, and SQLite makes no -shm file
            self.db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        if self._is_new():
            self.db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            with self.writing():
                if self._is_new():  # unless another process was faster
                    for table in _TABLES:
                        self.db.execute(table)
                    self.db.execute(f"PRAGMA application_id = {_APPLICATION}")
                    self.db.execute(f"PRAGMA user_version = {_SCHEMA}")
        application, schema = (self.pragma(name) for name in ("application_id", "user_version"))
        if application != _APPLICATION:
            raise StoreError(f"{self.path} is another program's database; name another folder", True)
        if schema != _SCHEMA:
            message = f"{self.path} was made by another version of detgen; name another folder, or delete it"
            raise StoreError(message, True)
        mode = "DELETE" if on_network(self.path) else "WAL"
        with suppress(sqlite3.OperationalError):  # another process is doing so just now
            self.db.execute(f"PRAGMA journal_mode = {mode}").fetchall()
        self.count()  # fails if tables are missing, and opens SQLite's other files

    def _is_new(self) -> bool:
        return not self._number("SELECT count(*) FROM sqlite_master") and not self.pragma("application_id")

    def _number(self, query: str) -> int:
        with self.watched():
            return int(self.db.execute(query).fetchone()[0])


_SYNCHRONOUS = {True: "FULL", False: "NORMAL"}
# Errors that are no sign of damage, and what to do.
_REMEDIES = (
    ("SQLITE_FULL", "free some space"),
    ("SQLITE_BUSY", "another process keeps it locked; wait for that"),
    ("SQLITE_LOCKED", "another process keeps it locked; wait for that"),
    ("SQLITE_READONLY", "make it writable, or name another folder"),
    ("SQLITE_PERM", "make it writable, or name another folder"),
    ("SQLITE_CANTOPEN", "name another folder"),
    ("SQLITE_IOERR", "look after its disk"),
    ("SQLITE_NOMEM", "free some memory"),
)


def beside(name: str) -> tuple[str, ...]:
    """Return the names of the files that SQLite puts beside a database of this name."""
    return tuple(f"{name}{ending}" for ending in ("-journal", "-wal", "-shm"))


def _is_file_or_free(place: Path) -> bool:
    """Return whether a place is a file or free, by one look: another process may remove its journal at any time."""
    try:
        return stat.S_ISREG(place.stat().st_mode)
    except FileNotFoundError:
        return not place.is_symlink()
