"""The stores of a run: the one of its folder, where that may be used, and a shared one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

from detgen.cache import make_store
from detgen.errors import RunError, StoreError
from detgen.outputs import FolderStore, OutputFolder, Samples, SharedStore, Store, differences_in_kind
from detgen.progress import Observer


@contextmanager
def shared_store(
    cache: Path | Literal["auto"] | None, folder: OutputFolder, observer: Observer
) -> Iterator[Store | None]:
    """The store of `--cache`; None if none is asked for, or it cannot be used, which is said.

    Raises:
        RunError: it is to be in the output folder.
    """
    if cache is None:
        yield None
        return
    if cache != "auto" and os.path.realpath(cache) == os.path.realpath(folder.path):
        raise RunError(f"the cache cannot be in the output folder {folder.path}; name another folder with --cache")
    store = None
    try:
        store = make_store(None if cache == "auto" else cache)
    except StoreError as error:
        observer.message(f"{error}. The run goes on without it")
    try:
        yield store
    finally:
        if store is not None:
            store.close()
            tell_damaged(store.path, store.damaged, observer)


def tell_damaged(path: Path, damaged: int, observer: Observer) -> None:
    """Say how many entries of a store were damaged, if any were."""
    if damaged:
        entries = "1 sample was" if damaged == 1 else f"{damaged:,} samples were"
        observer.message(f"{path}: {entries} damaged, and generated again")


def samples_of(
    own: FolderStore | None,
    shared: Store | None,
    manifest: dict[str, Any],
    source: str,
    observer: Observer,
    *,
    dated: bool,
) -> Samples:
    """The samples that a run may take.

    Args:
        own: the store of its folder, if it has one.
        shared: that of `--cache`, if one is asked for.
        manifest: the run's, with its profile; a run that is resumed has the day on which it began.
        source: what errors call the input.
        observer: is told what goes wrong with the shared one.
        dated: whether the text of a chat has the day in it.
    """
    begun = datetime.fromisoformat(manifest["created"]).astimezone().date().isoformat() if dated else ""
    view = None if shared is None else SharedStore(shared, observer.message)
    return Samples(own, view, manifest["profile"], source, begun, today() if dated else "")


def check_kind(folder: OutputFolder, former: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Keep what another model, version or command made in a folder from being lost from view.

    Args:
        folder: the output folder.
        former: the manifest of the run that it holds.
        manifest: this run's.

    Raises:
        RunError: it is such a run.
    """
    if found := differences_in_kind(former, manifest):
        state = "a finished" if former["status"] == "finished" else "an unfinished"
        raise RunError(
            f"{folder.path} holds {state} run that differs from this one: {'; '.join(found)}."
            " Start over with --overwrite, or choose another folder with -o"
        )


def today() -> str:
    """The present day, as keys of dated chats have it."""
    return date.today().isoformat()
