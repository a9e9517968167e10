"""The store of `--cache` as a run uses it: it never fails the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from detgen.errors import StoreError
from detgen.outputs.identity import Entry
from detgen.outputs.store import Store


class SharedStore(Store):
    """A store that other runs use, too.

    What goes wrong is said once; then the run goes on without it or, if it cannot be written, without adding to it.

    Args:
        path: the file.
        say: is told what goes wrong.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._readable = self._writable = True
        super().__init__(path, say=say)

    def find(self, key: bytes, place: int = 0) -> tuple[int, bytes] | None:
        """As `Store.find`."""
        try:
            return super().find(key, place) if self._readable else None
        except StoreError as error:
            self._readable = self._writable = False
            self._say(f"{error}. The run goes on without it")
            return None

    def add(self, profile: str, model: str, new: Iterable[Entry]) -> list[int]:
        """As `Store.add`."""
        try:
            return super().add(profile, model, new) if self._writable else []
        except StoreError as error:
            self._writable = False
            self._say(f"{error}. The run goes on, and what it makes is not kept there")
            return []

    # What goes wrong with these is said when samples are read or written.

    def has(self, key: bytes) -> bool:
        """As `Store.has`."""
        with suppress(StoreError):
            return super().has(key)
        return False

    def describe(self, stamp: str, value: bytes) -> None:
        """As `Store.describe`."""
        with suppress(StoreError):
            super().describe(stamp, value)

    def described(self, stamp: str) -> bytes | None:
        """As `Store.described`."""
        with suppress(StoreError):
            return super().described(stamp)
        return None
