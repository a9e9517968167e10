"""Where the stores of `--cache` are, and opening the one of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from detgen.errors import RunError, StoreError
from detgen.machine import user_cache
from detgen.outputs.directory import make_folder
from detgen.outputs.shared_store import SharedStore
from detgen.outputs.store import STORE, Store

_PRIVATE = 0o700  # it holds what its user had generated


def make_store(folder: Path | None, say: Callable[[str], None] = lambda text: None) -> SharedStore:
    """The cache of a folder, which is made if it is not there; None is the user's.

    Raises:
        StoreError: something else is in its place, or it cannot be used.
    """
    folder = folder or user_cache()
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file, and a cache is a folder; name another place")
        make_folder(folder, _PRIVATE)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder} of the cache: {error.strerror}") from None
    return SharedStore(folder / STORE, say)


@contextmanager
def store_of_run(
    cache: Path | Literal["auto"] | None, output: Path, say: Callable[[str], None]
) -> Iterator[SharedStore | None]:
    """The store of `--cache`; None if none is asked for, or it cannot be used, which is said.

    Args:
        cache: as `RunConfig.cache`.
        output: the output folder.
        say: is told what goes wrong.

    Raises:
        RunError: it is to be in the output folder.
    """
    store = None
    if cache is not None:
        if cache != "auto" and os.path.realpath(cache) == os.path.realpath(output):
            raise RunError(f"the cache cannot be in the output folder {output}; name another folder with --cache")
        try:
            store = make_store(None if cache == "auto" else cache, say)
        except StoreError as error:
            say(f"{error}. The run goes on without it")
    try:
        yield store
    finally:
        if store is not None:
            store.close()


@contextmanager
def open_store(folder: Path | None) -> Iterator[Store]:
    """The cache of a folder, which is there already; None is the user's.

    Raises:
        StoreError: there is none, or it cannot be used.
    """
    path = (folder or user_cache()) / STORE
    if not path.exists():
        raise StoreError(f"there is no cache in {path.parent}; detgen run --cache {folder or 'auto'} makes one")
    with closing(Store(path)) as store:
        yield store
