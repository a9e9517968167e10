"""The store of an output folder in use by a run: a damaged store is set aside, a deleted one is written again.

Intact entries of a damaged store are copied to a new one.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from detgen.errors import OutputError, StoreError
from detgen.outputs.directory import Directory, free_folder, writing
from detgen.outputs.folder import ASIDE, DRAFT_STORE, MANIFEST, OutputFolder
from detgen.outputs.identity import Entry, sound
from detgen.outputs.store import STORE, Store, beside

_RESUME = "run the same command again to resume"

_Look = tuple[int, int, int, int] | None  # device, inode, size and modification time of a file, if it exists
_STEP = 256  # entries to read at a time, as long as none is damaged
_LEAST = 100  # an entry takes at least this many bytes
_MOST = 1 << 28  # limit of entries; a larger number is damage, too


class FolderStore(Store):
    """The store of a folder; opened, and created if it does not exist.

    SQLite opens files by their paths, and a folder may be renamed, deleted or replaced meanwhile. So the store's files
    are identified by inode, size and time, and any change by others is noticed.

    Args:
        folder: the locked folder.
        say: receives messages about the store.

    Attributes:
        kept: number of samples that existed when the run began.
        whole: whether nothing went wrong with the store.

    Raises:
        OutputError: by every method, if the store cannot be used.
    """

    def __init__(self, folder: OutputFolder, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._directory = folder, folder.directory
        self._opening = self.whole = True
        folder.check()
        with writing(folder.store):
            if not self._directory.has(STORE) and self._directory.has(DRAFT_STORE):
                self._put_in_place()  # a run was killed in between
            self._check_names()
        new = not self._directory.has(STORE)
        try:
            super().__init__(folder.store, lone=True, say=say)
            if not new:
                self._check()
        except StoreError as error:
            if not error.damaged:
                raise self._unusable(error) from error
            self._set_aside(str(error.__cause__ or error))
        self._opening = False
        self._note_opened()
        self.begin()

    def begin(self) -> None:
        """Let the run take all entries that exist now."""
        self.until, self.kept = self.last(), self.count()

    def failed(self, error: StoreError) -> Exception:
        """See `Store.failed`; a store that was intact when it was opened has been changed since."""
        if self._opening:
            return error
        return self.changed() if error.damaged else self._unusable(error)

    def changed(self) -> OutputError:
        """Return the error for a store that does not hold what it should."""
        self.whole = False
        return OutputError(f"{self._folder.store} was changed while the run used it; {_RESUME}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `Store.writing`."""
        with super().writing():
            yield
        self._known = self._look()

    def keep(self) -> None:
        """Write the store again if its files were deleted or replaced.

        Raises:
            OutputError: if its content was changed by others.
        """
        if all(map(self._has, self._opened)):
            if self._look() != self._known:
                raise self.changed()
            return
        self._say(f"{self._folder.store} was deleted while the run used it; it is written again")
        with writing(self._folder.store):
            self._make_draft(self._copy)
            self.db.close()
            self._put_in_place()
        self._reopen()
        self._note_opened()

    def rescue(self) -> Path | None:
        """Return the folder with the samples of a lost one: itself, or a new one from which the run can be resumed.

        None if they could not be kept.
        """
        if self._has(STORE):
            return self._folder.path
        with suppress(OSError, OutputError):
            path = free_folder(self._folder.path)
            self._copy(path / STORE)
            with closing(Directory(path)) as kept:
                kept.write(MANIFEST, self._folder.latest)
            return path
        return None

    def close(self) -> None:
        """Close the store, leaving no other files of SQLite, unless something went wrong."""
        with suppress(OutputError):
            self.checkpoint()
        super().close()
        with suppress(OSError, OutputError):
            self._folder.check()
            if self.whole:
                self._remove_beside()
                self._directory.sync()

    def _copy(self, path: Path) -> None:
        """Copy the whole store to a new file, durably."""
        with self.watched(), closing(sqlite3.connect(path)) as target:
            self.db.backup(target)
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _unusable(self, error: StoreError) -> OutputError:
        self.whole = False
        return OutputError(f"{error}, then {_RESUME}")

    def _reopen(self) -> None:
        self.path = self._folder.store
        try:
            self.open()
        except StoreError as error:
            raise self.failed(error) from error

    def _check(self) -> None:
        try:
            self.check()
        except StoreError:
            self.db.close()
            raise

    def _look(self) -> dict[str, _Look]:
        found = {name: self._directory.look(name) for name in (STORE, *beside(STORE))}
        return {name: f and (f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns) for name, f in found.items()}

    def _note_opened(self) -> None:
        """Remember the files that SQLite opened; check that it found the folder's own store under its path."""
        self._known = self._look()
        self._opened = {name: found[:2] for name, found in self._known.items() if found is not None}
        own, here = self._directory.look(STORE), self._folder.store
        if own is None or not here.exists() or not os.path.samestat(own, here.stat()):
            raise OutputError(f"{here} was replaced while it was being opened; {_RESUME}")

    def _has(self, name: str) -> bool:
        found = self._directory.look(name)
        return found is not None and (found.st_dev, found.st_ino) == self._opened[name]

    def _check_names(self) -> None:
        """Refuse anything but plain files, and a store that can be changed under another name."""
        for name in (STORE, *beside(STORE)):
            self._directory.check(name)
        if (found := self._directory.look(STORE)) is not None and found.st_nlink > 1:
            raise OutputError(
                f"{self._folder.store} has another name, too (a hard link), under which it would be changed;"
                f" replace it by a copy, then {_RESUME}"
            )

    def _set_aside(self, reason: str) -> None:
        """Start a new store with the intact entries of the present one."""
        found: list[tuple[int, int | None]] = []
        try:
            with writing(self._folder.store):
                self._make_draft(lambda path: found.append(salvage(self._folder.store, path)))
                self._directory.replace(STORE, ASIDE)
                self._put_in_place()
            ((kept, lost),) = found
            what = f"{kept:,} finished sample{' is' if kept == 1 else 's are'} taken from it"
            missing = "what else it had" if lost is None else f"{lost:,} that {'is' if lost == 1 else 'are'} lost"
            self._say(
                f"{self._folder.store} is damaged ({reason}) and set aside as {ASIDE}: {what}, and {missing} will run"
                " again"
            )
            self._reopen()
        except StoreError as error:
            raise (self.changed() if error.damaged else self._unusable(error)) from error

    def _make_draft(self, write: Callable[[Path], None]) -> None:
        for name in beside(DRAFT_STORE):
            self._directory.remove(name)
        os.close(self._directory.create(DRAFT_STORE))
        write(self._folder.path / DRAFT_STORE)

    def _put_in_place(self) -> None:
        """Give the draft the store's name, after removing SQLite's other files of the old store."""
        self._remove_beside()
        self._directory.replace(DRAFT_STORE, STORE)

    def _remove_beside(self) -> None:
        for name in (*beside(STORE), *beside(DRAFT_STORE)):
            self._directory.remove(name)


def salvage(damaged: Path, into: Path) -> tuple[int, int | None]:
    """Copy all entries that are intact by their own digests.

    Args:
        damaged: the database, which is read as far as possible.
        into: path of the new database.

    Returns:
        The number of entries copied, and the number lost; None if that is unknown.

    Raises:
        StoreError: if the new database cannot be written.
    """
    kept = 0
    with closing(Store(into, lone=True)) as store, closing(sqlite3.connect(damaged, timeout=5)) as db:
        db.text_factory = lambda data: data.decode(errors="replace")
        with suppress(sqlite3.Error):
            db.execute("PRAGMA writable_schema = ON")  # else SQLite reads nothing of a truncated file
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
    """Yield the readable rows with ids up to `last`."""
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
