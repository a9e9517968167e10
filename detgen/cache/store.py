"""The database of a completion cache: one file, shared by processes, on a local disk.

Nothing in it is believed: an entry counts only if a digest over its key and its bytes says that it is whole. The
database is in WAL mode, so that readers and a writer do not wait for each other, and a process may be killed at any
moment.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import detgen
from detgen.errors import CacheError
from detgen.outputs.identity import fingerprint

_APPLICATION = 0x64746763  # "dtgc"
_SCHEMA = 1
_PATIENCE = 5.0  # seconds to wait for a process that is writing
_USE_SECONDS = 3600  # the time of the last use is noted to within so much
_DIGEST = 16  # bytes
_BESIDE = ("-journal", "-wal", "-shm")  # files of SQLite's beside a database
_PAGES = 4000  # that are given back at a time, so that nobody waits for long
_PROMPTING = ("transformers", "tokenizers", "jinja2")  # what turns a prompt into tokens

# Values are apart from the rest, so that what is asked of all entries reads little.
_TABLES = (
    "CREATE TABLE profiles (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, model TEXT NOT NULL,"
    " version TEXT NOT NULL)",
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, profile INTEGER NOT NULL,"
    " tokens INTEGER NOT NULL, used INTEGER NOT NULL)",
    "CREATE TABLE completions (id INTEGER PRIMARY KEY, value BLOB NOT NULL)",
)

# Made where it is needed: caches of former versions have none.
_ENGINES = "CREATE TABLE IF NOT EXISTS engines (stamp BLOB PRIMARY KEY, value BLOB NOT NULL)"


@dataclass(frozen=True, slots=True)
class New:
    """A completion to be kept.

    Attributes:
        key: see `entry_key`.
        tokens: its number of tokens.
        value: its bytes.
    """

    key: bytes
    tokens: int
    value: bytes


def profile_digest(profile: dict[str, Any]) -> str:
    """Digest of everything on which a completion depends beside the request, the reading of prompts included."""
    versions = [importlib.metadata.version(package) for package in _PROMPTING]
    text = "\n".join((fingerprint(profile, 32), *versions))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).hexdigest()


def entry_key(profile: str, content: str, sample: int) -> bytes:
    """The key of a completion, given `profile_digest` and `content_digest`, which a day may follow."""
    return hashlib.blake2b(f"{profile}\n{content}\n{sample}".encode(), digest_size=2 * _DIGEST).digest()


class Store:
    """Opens the database, and makes it if it is not there.

    Args:
        path: the file.
        fixed: nobody writes to it, this process neither.
        lone: nobody else uses it, and whoever made it makes it durable.

    Attributes:
        path: the file.
        damaged: how many entries were found to be damaged; `add` removes them.

    Raises:
        CacheError: by every method: the database cannot be used; the message names it, the reason and the remedy.
    """

    def __init__(self, path: Path, *, fixed: bool = False, lone: bool = False) -> None:
        self.path = path
        self.damaged = 0
        self._damaged: list[tuple[int, bytes]] = []
        self._used: list[int] = []
        for place in (path, *(path.with_name(path.name + ending) for ending in _BESIDE)):
            # SQLite would wait for a pipe, and make what a dangling link names.
            if os.path.lexists(place) and not os.path.isfile(place):
                raise CacheError(f"{place} is no file, so no cache of detgen can be there; name another folder")
        uri = f"file:{quote(str(path.absolute()))}{'?mode=ro&immutable=1' if fixed else ''}"
        with self.watched():
            self.db = sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)
        try:
            with self.watched():
                self._prepare(fixed=fixed, lone=lone)
        except CacheError:
            self.db.close()
            raise

    def close(self) -> None:
        """Note what was used, as far as that can be written, and close it."""
        with suppress(CacheError):
            self._note_uses()
        with suppress(sqlite3.Error):
            self.db.close()

    def find(self, key: bytes) -> bytes | None:
        """The bytes of an entry; None if there is none, or it is damaged."""
        with self.watched():
            row = self.db.execute(
                "SELECT entries.id, used, value FROM entries LEFT JOIN completions USING (id) WHERE key = ?", (key,)
            ).fetchone()
        if row is None:
            return None
        entry, used, value = row
        if (found := sound(key, value)) is None:
            self.damaged += 1
            self._damaged.append((entry, key))
        elif not isinstance(used, int) or used < time.time() - _USE_SECONDS:
            self._used.append(entry)
        return found

    def has(self, key: bytes) -> bool:
        """Whether there is an entry, damaged or not."""
        with self.watched():
            return self.db.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None

    def add(self, profile: str, model: str, new: Iterable[New]) -> None:
        """Keep completions, all of them or, on an error, none; of those that are there already, the former ones stay.

        Args:
            profile: `profile_digest`.
            model: what the model is called.
            new: the completions.
        """
        with self.writing():
            for entry, key in self._damaged:
                if self.db.execute("DELETE FROM entries WHERE id = ? AND key = ?", (entry, key)).rowcount:
                    self.db.execute("DELETE FROM completions WHERE id = ?", (entry,))
            owner = self._profile(profile, model)
            for each in new:
                self._insert(each, owner)
        self._damaged.clear()
        self._note_uses(least=1000)

    def describe(self, stamp: str, value: bytes) -> None:
        """Keep what an engine is, by the stamp of its configuration."""
        key = bytes.fromhex(stamp)
        with self.writing():
            self.db.execute(_ENGINES)
            self.db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (key, _digest(key, value) + value))

    def described(self, stamp: str) -> bytes | None:
        """What was kept for a stamp; None if there is nothing, or it is damaged."""
        with self.watched():
            if not self.db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'engines'").fetchone()[0]:
                return None
            row = self.db.execute("SELECT value FROM engines WHERE stamp = ?", (bytes.fromhex(stamp),)).fetchone()
        return None if row is None else sound(bytes.fromhex(stamp), row[0])

    def forget_engines(self) -> None:
        """Remove all that `describe` keeps."""
        with self.writing():
            self.db.execute("DROP TABLE IF EXISTS engines")

    def count(self) -> int:
        """How many completions there are."""
        with self.watched():
            return int(self.db.execute("SELECT count(*) FROM entries").fetchone()[0])

    def _insert(self, new: New, profile: int) -> None:
        now = int(time.time())
        done = self.db.execute(
            "INSERT INTO entries (key, profile, tokens, used) VALUES (?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
            (new.key, profile, new.tokens, now),
        )
        if done.rowcount:
            digest = _digest(new.key, new.value)
            self.db.execute("INSERT OR REPLACE INTO completions VALUES (?, ?)", (done.lastrowid, digest + new.value))

    def remove(self, entries: list[int]) -> None:
        """Remove entries."""
        with self.writing():
            for table in ("entries", "completions"):
                self.db.executemany(f"DELETE FROM {table} WHERE id = ?", [(each,) for each in entries])

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove the entries with these keys, as far as they are there."""
        found = (self.db.execute("SELECT id FROM entries WHERE key = ?", (key,)).fetchone() for key in keys)
        with self.watched():
            self.remove([row[0] for row in found if row is not None])

    def shrink(self) -> None:
        """Give free space back."""
        with self.watched():
            for _ in range(-(-self.pragma("freelist_count") // _PAGES)):
                self.db.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` stops after one page

    def _profile(self, digest: str, model: str) -> int:
        known = (bytes.fromhex(digest), model, detgen.__version__)
        self.db.execute("INSERT OR IGNORE INTO profiles (digest, model, version) VALUES (?, ?, ?)", known)
        return int(self.db.execute("SELECT id FROM profiles WHERE digest = ?", known[:1]).fetchone()[0])

    def _note_uses(self, least: int = 1) -> None:
        if len(self._used) < least:
            return
        used, self._used = self._used, []
        with self.writing():
            now = int(time.time())
            self.db.executemany("UPDATE entries SET used = ? WHERE id = ?", [(now, each) for each in used])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of the block, or nothing."""
        with self.watched():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    def _prepare(self, *, fixed: bool, lone: bool) -> None:
        self.db.text_factory = lambda data: data.decode(errors="replace")  # damage may make a text of anything
        self.db.execute("PRAGMA trusted_schema = OFF")
        self.db.execute("PRAGMA cell_size_check = ON")
        if lone:
            self.db.execute("PRAGMA journal_mode = MEMORY")
            self.db.execute("PRAGMA synchronous = OFF")
        elif not fixed:
            self.db.execute("PRAGMA synchronous = NORMAL")
        if self._is_new() and not fixed:
            self.db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            with self.writing():
                if self._is_new():  # unless another process was quicker
                    for table in _TABLES:
                        self.db.execute(table)
                    self.db.execute(f"PRAGMA application_id = {_APPLICATION}")
                    self.db.execute(f"PRAGMA user_version = {_SCHEMA}")
        application, schema = (self.pragma(name) for name in ("application_id", "user_version"))
        if application != _APPLICATION:
            raise CacheError(f"{self.path} is another program's database; name another folder")
        if schema != _SCHEMA:
            raise CacheError(f"{self.path} was made by another version of detgen; name another folder, or delete it")
        if not fixed and not lone:
            with suppress(sqlite3.OperationalError):  # somebody else is just doing so
                self.db.execute("PRAGMA journal_mode = WAL")

    def pragma(self, name: str) -> int:
        """The number that a pragma has."""
        return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    def _is_new(self) -> bool:
        tables = self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return not tables and not self.pragma("application_id")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn SQLite's errors into messages that name the file, the reason and the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_NOTADB":
                raise CacheError(f"{self.path} is not a cache of detgen; name another folder, or move it") from None
            remedy = next((what for start, what in _REMEDIES if name.startswith(start)), "name another folder")
            raise CacheError(f"cannot use the cache {self.path}: {error}; {remedy}") from None


_REMEDIES = (
    ("SQLITE_CORRUPT", "delete it"),
    ("SQLITE_FULL", "free some space"),
    ("SQLITE_BUSY", "another process keeps it locked; wait for that"),
    ("SQLITE_LOCKED", "another process keeps it locked; wait for that"),
    ("SQLITE_READONLY", "make it writable, or name another folder"),
)


def sound(key: bytes, value: object) -> bytes | None:
    """The bytes of an entry without their digest; None if it is not the one of key and bytes."""
    if not isinstance(value, bytes) or _digest(key, value[_DIGEST:]) != value[:_DIGEST]:
        return None
    return value[_DIGEST:]


def _digest(key: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST, key=key).digest()
