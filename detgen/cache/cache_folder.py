"""Where the stores of `--cache` are, and opening the one of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from detgen.errors import StoreError
from detgen.outputs.directory import make_folder
from detgen.outputs.store import STORE, Store

_PRIVATE = 0o700  # it holds what its user had generated


def default_folder() -> Path:
    """Where a user's cache is: `$XDG_CACHE_HOME/detgen`, or `~/.cache/detgen`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "detgen"


def make_store(folder: Path | None) -> Store:
    """The cache of a folder, which is made if it is not there; None is the user's.

    Raises:
        StoreError: something else is in its place, or it cannot be used.
    """
    folder = folder or default_folder()
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file, and a cache is a folder; name another place")
        make_folder(folder, _PRIVATE)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder} of the cache: {error.strerror}") from None
    return Store(folder / STORE)


@contextmanager
def open_store(folder: Path | None) -> Iterator[Store]:
    """The cache of a folder, which is there already; None is the user's.

    Raises:
        StoreError: there is none, or it cannot be used.
    """
    path = (folder or default_folder()) / STORE
    if not path.exists():
        raise StoreError(f"there is no cache in {path.parent}; detgen run --cache {folder or 'auto'} makes one")
    with closing(Store(path)) as store:
        yield store
