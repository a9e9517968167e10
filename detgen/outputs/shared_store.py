"""The store of `--cache` in use by a run: it never makes the run fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from detgen.errors import StoreError
from detgen.outputs.identity import Entry
from detgen.outputs.store import Store


class SharedStore(Store):
    """A store that runs share.

    An error is reported once; the run then continues without the store or, if it cannot be written, only reads it.

    Args:
        path: path of the database.
        say: receives errors.

    Raises:
        StoreError: if it cannot be opened.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._readable = self._writable = True
        super().__init__(path, say=say)

    def find(self, key: bytes, place: int = 0) -> tuple[int, bytes] | None:
        """See `Store.find`."""
        try:
            return super().find(key, place) if self._readable else None
        except StoreError as error:
            self._readable = self._writable = False
            self._say(f"{error}. The run goes on without it")
            return None

    def add(self, profile: str, model: str, new: Iterable[Entry]) -> list[int]:
        """See `Store.add`."""
        try:
            return super().add(profile, model, new) if self._writable else []
        except StoreError as error:
            self._writable = False
            self._say(f"{error}. The run goes on, and what it makes is not kept there")
            return []

    # Errors of these are reported when samples are read or written.

    def has(self, key: bytes) -> bool:
        """See `Store.has`."""
        with suppress(StoreError):
            return super().has(key)
        return False

    def describe(self, stamp: str, value: bytes) -> None:
        """See `Store.describe`."""
        with suppress(StoreError):
            super().describe(stamp, value)

    def described(self, stamp: str) -> bytes | None:
        """See `Store.described`."""
        with suppress(StoreError):
            return super().described(stamp)
        return None
