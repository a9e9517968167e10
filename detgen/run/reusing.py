"""What a run takes from earlier ones instead of generating it: from the one in its folder, and from a shared cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, Self

from detgen.cache import CompletionCache, Store, keep_former, make_store, profile_digest
from detgen.engine.request import Completion, Request
from detgen.errors import CacheError, RunError
from detgen.outputs import OutputFolder, changes, differences
from detgen.outputs.folder import FORMER
from detgen.progress import Observer


class Reuse:
    """The caches of one run.

    Args:
        shared: the user's cache; None for none.
        folder: the output folder, which may hold what an earlier run finished.
        manifest: the run's, with its profile.
        observer: is told what goes wrong.
        dated: whether the text of a chat has the day in it.
    """

    def __init__(
        self,
        shared: Store | None,
        folder: OutputFolder,
        manifest: dict[str, Any],
        observer: Observer,
        *,
        dated: bool,
    ) -> None:
        self._opened = ExitStack()
        self._sources: list[CompletionCache] = []
        self._shared: CompletionCache | None = None
        self._dated = dated
        known = profile_digest(manifest["profile"]), manifest["profile"]["target"]["name"], observer.message
        if folder.directory.has(FORMER):
            try:
                store = Store(folder.path / FORMER, fixed=True)
            except CacheError as error:
                observer.message(f"{error}. What an earlier run had finished is generated again")
            else:
                self._opened.callback(store.close)
                self._sources.append(CompletionCache(store, *known))
        if shared is not None:
            self._shared = CompletionCache(shared, *known, day=today() if dated else "")
            self._sources.append(self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shared is not None:
            self._shared.flush()
        self._opened.close()

    def take(self, request: Request, samples: Sequence[int]) -> list[Completion]:
        """Those of a request's samples that are known already."""
        found: dict[int, Completion] = {}
        for source in self._sources:
            known = source.take(request, [sample for sample in samples if sample not in found])
            if self._shared is not None and source is not self._shared and not self._dated:
                self._shared.add(known)  # of a dated chat, nobody knows the day any more
            found |= {completion.sample: completion for completion in known}
        return list(found.values())

    def keep(self, completions: Sequence[Any]) -> None:
        """Keep what was generated for later runs."""
        if self._shared is not None and completions:
            self._shared.add(completions)
            self._shared.flush()


@contextmanager
def shared_cache(
    cache: Path | Literal["auto"] | None, folder: OutputFolder, observer: Observer
) -> Iterator[Store | None]:
    """The cache that a run is to use; None if none is asked for, or it cannot be used, which is said.

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
    except CacheError as error:
        observer.message(f"{error}. The run goes on without it")
    try:
        yield store
    finally:
        if store is not None:
            store.close()
            if store.damaged:
                entries = "1 completion was" if store.damaged == 1 else f"{store.damaged:,} completions were"
                observer.message(f"{store.path}: {entries} damaged, and generated again")


def check_same(folder: OutputFolder, former: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """What differs between the run that a folder holds and this one, where samples of that one may be of use.

    Args:
        folder: the output folder.
        former: the manifest of the run that it holds.
        manifest: this run's.

    Raises:
        RunError: anything else differs.
    """
    found = differences(former, manifest)
    scores = "command" in manifest
    if found and (scores or set(found) - set(changes(former, manifest))):
        raise _refusal(folder, former, "; ".join(found))
    return found


def _refusal(folder: OutputFolder, former: dict[str, Any], found: str) -> RunError:
    state = "a finished" if former["status"] == "finished" else "an unfinished"
    return RunError(
        f"{folder.path} holds {state} run that differs from this one: {found}."
        " Start over with --overwrite, or choose another folder with -o"
    )


def succeed(
    folder: OutputFolder,
    former: dict[str, Any],
    manifest: dict[str, Any],
    changed: list[str],
    observer: Observer,
    *,
    dated: bool,
) -> None:
    """Make a folder that of another run, which takes over what the one that it holds has finished.

    A crash at any moment leaves the one run or the other, and every sample in one file or another.

    Args:
        folder: the output folder.
        former: the manifest of the run that it holds.
        manifest: that of the run to be, with its profile.
        changed: what differs between them.
        observer: is told of it.
        dated: whether the text of a chat has the day in it; then that must be the day of the other run, too.

    Raises:
        RunError: not all samples can be taken over.
    """
    observer.stage("keeping what the earlier run finished")
    begun = datetime.fromisoformat(former["created"]).astimezone().date().isoformat()
    try:
        kept = None
        if not dated or begun == today():
            kept = keep_former(folder, former, profile_digest(manifest["profile"]))
    except CacheError as error:
        raise RunError(f"{error}; or choose another output folder with -o") from None
    if kept is None:
        raise _refusal(folder, former, f"{'; '.join(changed)}; and not all of its samples can be taken over")
    samples = "1 sample" if kept == 1 else f"{kept:,} samples"
    observer.message(
        f"{folder.path}: {'; '.join(changed)}. What the earlier run finished ({samples}) is used where it fits;"
        " only what is new is generated"
    )
    folder.succeed(piped=manifest["input"]["path"] == "-")


def today() -> str:
    """The present day, as keys of dated chats have it."""
    return date.today().isoformat()
