"""The store of an output folder while a run uses it: found damaged it is set aside, deleted it is put back."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from detgen.errors import OutputError, StoreError
from detgen.outputs.directory import writing
from detgen.outputs.folder import ASIDE, DRAFT_STORE, OutputFolder
from detgen.outputs.salvaging import salvage
from detgen.outputs.store import STORE, Entry, Store, beside

_RESUME = "run the same command again to resume"

_Look = tuple[int, int, int, int] | None  # device, inode, size and time of the last change of a file, if it is there


class FolderStore:
    """Opens the store of a folder, and makes it if it is not there.

    SQLite opens files by their paths, and a folder may be renamed, deleted or exchanged meanwhile. So the files that
    belong to the store are known by their inodes, sizes and times, and whatever changes them is noticed.

    Args:
        folder: locked.
        say: is told what happens to it.

    Attributes:
        kept: samples that were there when the run began.
        whole: whether nothing went wrong with it.

    Raises:
        OutputError: by every method, if the store cannot be used.
    """

    def __init__(self, folder: OutputFolder, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._directory, self._say = folder, folder.directory, say
        self.whole = True
        folder.check()
        with writing(folder.store):
            if not self._directory.has(STORE) and self._directory.has(DRAFT_STORE):
                self._put_in_place()  # a run was killed on the way
            self._check_names()
        try:
            new = not self._directory.has(STORE)
            self._store = Store(folder.store, lone=True)
            try:
                if not new:
                    self._store.check()
            except StoreError:
                self._store.close()
                raise
        except StoreError as error:
            if not error.damaged:
                raise OutputError(f"{error}, then {_RESUME}") from error
            self._set_aside(str(error.__cause__ or error))
        self._note_opened()
        self.begin()

    def begin(self) -> None:
        """Whatever is there by now may be taken."""
        with self._used():
            self._until, self.kept = self._store.last(), self._store.count()

    @property
    def damaged(self) -> int:
        """How many entries were found to be damaged."""
        return self._store.damaged

    def find(self, key: bytes, place: int) -> tuple[int, bytes] | None:
        """An entry that was there when the run began, and its bytes; arguments as `Store.find`."""
        if not self._until:
            return None
        with self._used():
            return self._store.find(key, place, self._until)

    def has(self, key: bytes) -> bool:
        """Whether there is an entry, damaged or not."""
        with self._used():
            return self._store.has(key)

    def read(self, entry: int) -> bytes:
        """The bytes of an entry."""
        with self._used():
            found = self._store.read(entry)
        if found is None:
            raise self._changed()
        return found

    def add(self, profile: str, model: str, new: Sequence[Entry]) -> list[int]:
        """Keep samples, durably; their entries. Arguments as `Store.add`."""
        with self._used():
            entries = self._store.add(profile, model, new)
        self._note()
        return entries

    def describe(self, stamp: str, value: bytes) -> None:
        """As `Store.describe`."""
        with self._used():
            self._store.describe(stamp, value)
        self._note()

    def described(self, stamp: str) -> bytes | None:
        """As `Store.described`."""
        with self._used():
            return self._store.described(stamp)

    def keep(self) -> None:
        """Put the store back if its files are gone or others have their names.

        Raises:
            OutputError: somebody changed it.
        """
        if all(map(self._has, self._opened)):
            if self._look() != self._known:
                raise self._changed()
            return
        self._say(f"{self._folder.store} was deleted while the run used it; it is written again")
        with writing(self._folder.store):
            self._make_draft(self.copy)
            self._store.close()
            self._put_in_place()
        with self._used():
            self._store = Store(self._folder.store, lone=True)
        self._note_opened()

    @property
    def held(self) -> bool:
        """Whether the folder still has it."""
        return self._has(STORE)

    def copy(self, path: Path) -> None:
        """Write all of it to a new file, durably.

        Raises:
            StoreError, OSError: it cannot be written.
        """
        with self._store.watched(), closing(sqlite3.connect(path)) as target:
            self._store.db.backup(target)
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        """Close it; nothing stands beside it then, unless something went wrong."""
        with suppress(StoreError):
            self._store.note_uses()
        try:
            self._store.checkpoint()
        except StoreError:
            self.whole = False
        self._store.close()
        with suppress(OSError, OutputError):
            self._folder.check()
            if self.whole:
                self._remove_beside()
                self._directory.sync()

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self.whole = False
            raise (self._changed() if error.damaged else OutputError(f"{error}, then {_RESUME}")) from error

    def _changed(self) -> OutputError:
        self.whole = False
        return OutputError(f"{self._folder.store} was changed while the run used it; {_RESUME}")

    def _look(self) -> dict[str, _Look]:
        found = {name: self._directory.look(name) for name in (STORE, *beside(STORE))}
        return {name: f and (f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns) for name, f in found.items()}

    def _note(self) -> None:
        """Remember the files as they are now."""
        self._known = self._look()

    def _note_opened(self) -> None:
        """Remember the files as SQLite opened them; that of the store must be the one that it found by its path."""
        self._note()
        self._opened = {name: found[:2] for name, found in self._known.items() if found is not None}
        own, here = self._directory.look(STORE), self._folder.store
        if own is None or not here.exists() or not os.path.samestat(own, here.stat()):
            raise OutputError(f"{here} was exchanged while it was opened; {_RESUME}")

    def _has(self, name: str) -> bool:
        found = self._directory.look(name)
        return found is not None and (found.st_dev, found.st_ino) == self._opened[name]

    def _check_names(self) -> None:
        """Refuse what is no plain file, and a store that another name would change."""
        for name in (STORE, *beside(STORE)):
            self._directory.check(name)
        if (found := self._directory.look(STORE)) is not None and found.st_nlink > 1:
            raise OutputError(
                f"{self._folder.store} has another name, too (a hard link), under which it would be changed;"
                f" replace it by a copy, then {_RESUME}"
            )

    def _set_aside(self, reason: str) -> None:
        """Begin a new store with whatever is whole in the one that is there."""
        found: list[tuple[int, int | None]] = []
        with writing(self._folder.store):
            self._make_draft(lambda path: found.append(salvage(self._folder.store, path)))
            self._directory.replace(STORE, ASIDE)
            self._put_in_place()
        ((kept, lost),) = found
        what = f"{kept:,} finished sample{' is' if kept == 1 else 's are'} taken from it"
        missing = "what else it had" if lost is None else f"{lost:,} that {'is' if lost == 1 else 'are'} lost"
        self._say(
            f"{self._folder.store} is damaged ({reason}) and set aside as {ASIDE}: {what}, and {missing} will run again"
        )
        with self._used():
            self._store = Store(self._folder.store, lone=True)

    def _make_draft(self, write: Callable[[Path], None]) -> None:
        for name in beside(DRAFT_STORE):
            self._directory.remove(name)
        os.close(self._directory.create(DRAFT_STORE))
        with self._used():
            write(self._folder.path / DRAFT_STORE)

    def _put_in_place(self) -> None:
        """Give the draft the store's name; what stands beside that name would be taken for the draft's."""
        self._remove_beside()
        self._directory.replace(DRAFT_STORE, STORE)

    def _remove_beside(self) -> None:
        for name in (*beside(STORE), *beside(DRAFT_STORE)):
            self._directory.remove(name)
