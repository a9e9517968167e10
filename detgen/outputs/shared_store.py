"""The store of `--cache` as a run uses it: it never fails the run."""

from __future__ import annotations

from collections.abc import Callable

from detgen.errors import StoreError
from detgen.outputs.store import Entry, Store


class SharedStore:
    """A store that other runs use, too.

    What goes wrong is said once; then the run goes on without it or, if it cannot be written, without adding to it.

    Args:
        store: whoever opened it closes it.
        say: is told what goes wrong.
    """

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._readable = self._writable = True
        self._new: list[Entry] = []

    def find(self, key: bytes) -> bytes | None:
        """The bytes of an entry; None if there is none, or it is damaged."""
        try:
            found = self._store.find(key) if self._readable else None
        except StoreError as error:
            self._readable = self._writable = False
            self._say(f"{error}. The run goes on without it")
            return None
        return None if found is None else found[1]

    def has(self, key: bytes) -> bool:
        """Whether there is an entry, damaged or not."""
        try:
            return self._store.has(key)
        except StoreError:  # it is said when it is to be taken
            return False

    @property
    def waiting(self) -> int:
        """Samples that were added and not committed."""
        return len(self._new)

    def add(self, new: Entry) -> None:
        """Keep a sample, if it is not there yet, from the next `commit` on."""
        if self._writable:
            self._new.append(new)

    def commit(self, profile: str, model: str) -> None:
        """Write what was added; from now on other processes find it. Arguments as `Store.add`."""
        new, self._new = self._new, []
        try:
            if new and self._writable:
                self._store.add(profile, model, new)
        except StoreError as error:
            self._writable = False
            self._say(f"{error}. The run goes on, and what it makes is not kept there")
