"""Opens, describes and prunes the stores of `--cache`; other processes may use them meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import detgen
from detgen.errors import RunError, StoreError
from detgen.machine import user_cache
from detgen.outputs.directory import make_folder
from detgen.outputs.identity import sound
from detgen.outputs.shared_store import SharedStore
from detgen.outputs.store import STORE, Store

_PRIVATE = 0o700  # it holds what its user had generated
_BATCH = 1000  # entries per transaction, so that no other process waits for long
_PAGES = 4000  # pages to free at a time, for the same reason


def make_store(folder: Path | None, say: Callable[[str], None] = lambda text: None) -> SharedStore:
    """Open the cache in a folder, creating it if it does not exist; None is the user's cache.

    Raises:
        StoreError: if something else has its name, or it cannot be used.
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
    """Open the store of `--cache`; None if it is not asked for or cannot be used, which is reported.

    Args:
        cache: as in `RunConfig.cache`.
        output: the output folder.
        say: receives errors.

    Raises:
        RunError: if it would be in the output folder.
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
    """Open the cache in a folder, which must exist; None is the user's cache.

    Raises:
        StoreError: if there is none, or it cannot be used.
    """
    path = (folder or user_cache()) / STORE
    if not path.exists():
        raise StoreError(f"there is no cache in {path.parent}; detgen run --cache {folder or 'auto'} makes one")
    with closing(Store(path)) as store:
        yield store


@dataclass(frozen=True, slots=True)
class Model:
    """What a cache has of one model under one profile.

    Attributes:
        name: name of the model.
        digest: beginning of the profile's digest.
        version: detgen's version.
        completions: number of completions.
        tokens: number of their tokens.
    """

    name: str
    digest: str
    version: str
    completions: int
    tokens: int

    @property
    def usable(self) -> bool:
        """Whether this version of detgen can use the completions."""
        return self.version == detgen.__version__


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a cache.

    Attributes:
        size: bytes of the database.
        models: what it has of each model, most completions first.
        oldest: time of use of the completion unused for longest, in seconds since 1970; None if there is none.
        latest: time of the latest use.
        damaged: number of completions with a wrong digest; None if that was not checked.
    """

    size: int
    models: tuple[Model, ...] = field(default=())
    oldest: int | None = None
    latest: int | None = None
    damaged: int | None = None

    @property
    def completions(self) -> int:
        """Number of completions."""
        return sum(model.completions for model in self.models)

    @property
    def tokens(self) -> int:
        """Number of their tokens."""
        return sum(model.tokens for model in self.models)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning: completions removed, and bytes of the database before and after."""

    removed: int
    before: int
    after: int


def contents(store: Store, *, check: bool = False) -> Contents:
    """Return the contents of a cache.

    Args:
        store: the cache.
        check: read each completion and verify its digest.

    Raises:
        StoreError: if it cannot be read.
    """
    with store.watched():
        models = store.db.execute(
            "SELECT model, digest, version, count(*), sum(tokens) FROM entries JOIN profiles ON profiles.id = profile"
            " GROUP BY profile ORDER BY count(*) DESC, model"
        ).fetchall()
        oldest, latest = store.db.execute("SELECT min(used), max(used) FROM entries").fetchone()
        return Contents(
            size=_size(store),
            models=tuple(Model(name, digest.hex()[:12], *rest) for name, digest, *rest in models),
            oldest=oldest,
            latest=latest,
            damaged=sum(map(len, _damaged(store))) if check else None,
        )


def prune(store: Store, *, older_than: float | None = None, max_size: int | None = None) -> Pruned:
    """Remove completions and all descriptions of engines, and free their space.

    Args:
        store: the cache.
        older_than: remove completions unused for this many seconds.
        max_size: remove the least recently used completions until the database has at most this many bytes. With
            neither, damaged completions and those that this version of detgen cannot use are removed.

    Raises:
        StoreError: if it cannot be written.
    """
    before, removed = _size(store), 0
    doomed: list[Iterator[list[int]]] = []
    if older_than is None and max_size is None:
        doomed += _damaged(store), _of_other_versions(store)
    if older_than is not None:
        doomed.append(_unused_since(store, int(time.time() - older_than)))
    if max_size is not None:
        doomed.append(_least_used(store, max_size))
    with store.watched():
        with store.writing():
            store.db.execute("DELETE FROM engines")
        for entries in chain.from_iterable(doomed):
            with store.writing():
                for table in ("entries", "packed"):
                    store.db.executemany(f"DELETE FROM {table} WHERE id = ?", [(each,) for each in entries])
            removed += len(entries)
        for _ in range(-(-store.pragma("freelist_count") // _PAGES)):
            store.db.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` stops after one page
        store.checkpoint()
    return Pruned(removed, before, _size(store))


def _size(store: Store) -> int:
    """Return the bytes of the database, without free pages."""
    with store.watched():
        return (store.pragma("page_count") - store.pragma("freelist_count")) * store.pragma("page_size")


def _damaged(store: Store) -> Iterator[list[int]]:
    """Yield damaged entries, some at a time."""
    last = -1
    while rows := store.db.execute(
        "SELECT entries.id, key, value FROM entries LEFT JOIN packed USING (id) WHERE entries.id > ?"
        " ORDER BY entries.id LIMIT ?",
        (last, _BATCH),
    ).fetchall():
        last = rows[-1][0]
        if found := [entry for entry, key, value in rows if sound(key, value) is None]:
            yield found


def _of_other_versions(store: Store) -> Iterator[list[int]]:
    query = "SELECT id FROM entries WHERE profile NOT IN (SELECT id FROM profiles WHERE version = ?) LIMIT ?"
    while rows := store.db.execute(query, (detgen.__version__, _BATCH)).fetchall():
        yield [entry for (entry,) in rows]


def _unused_since(store: Store, moment: int) -> Iterator[list[int]]:
    while rows := store.db.execute("SELECT id FROM entries WHERE used <= ? LIMIT ?", (moment, _BATCH)).fetchall():
        yield [entry for (entry,) in rows]


def _least_used(store: Store, most: int) -> Iterator[list[int]]:
    """Yield the entries to remove until the database has at most this many bytes, some at a time."""
    joined = "entries LEFT JOIN packed USING (id)"
    query = f"SELECT entries.id, length(value) FROM {joined} ORDER BY used, entries.id LIMIT ?"
    while (excess := _size(store) - most) > 0 and (rows := store.db.execute(query, (_BATCH,)).fetchall()):
        before = accumulate((size or 0 for _, size in rows), initial=0)
        # Removing them frees whole pages, hence more than their bytes: half as many at a time do not overshoot.
        yield [entry for (entry, _), sum in zip(rows, before, strict=False) if 2 * sum < excess]
