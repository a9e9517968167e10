"""A completion cache as a run uses it: it never fails the run, and never gives what a fresh run would not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from detgen.cache.packed_values import pack, unpack
from detgen.cache.store import New, Store, entry_key
from detgen.engine.request import Completion, Request
from detgen.errors import CacheError
from detgen.outputs.lines import content_digest

_BATCH = 256  # completions that are added without being written


class CompletionCache:
    """The completions of one profile in a store.

    What goes wrong is said once; then the run goes on without the cache, or, if it cannot be written, without adding to
    it.

    Args:
        store: has the completions of all profiles; whoever opened it closes it.
        profile: `profile_digest`.
        model: what the model is called.
        say: is told what goes wrong.
        day: the present one, if the text of a chat has it; a chat's completions are those of a day then.
    """

    def __init__(self, store: Store, profile: str, model: str, say: Callable[[str], None], day: str = "") -> None:
        self._store = store
        self._profile, self._model = profile, model
        self._say = say
        self._day = day
        self._readable = self._writable = True
        self._new: list[New] = []

    def take(self, request: Request, samples: Iterable[int]) -> list[Completion]:
        """Those of a request's samples that are there, as that request's."""
        content = self._content(request)
        if content is None:
            return []
        found = (self._take(request, content, sample) for sample in samples)
        return [completion for completion in found if completion is not None]

    def has(self, request: Request) -> bool:
        """Whether all of a request's samples are there, damaged or not."""
        content = self._content(request)
        try:
            return content is not None and all(
                self._store.has(entry_key(self._profile, content, sample)) for sample in request.wanted
            )
        except CacheError:  # it is said when they are to be taken
            return False

    def _content(self, request: Request) -> str | None:
        content = content_digest(request)
        return content and content + (self._day if request.messages is not None else "")

    def _take(self, request: Request, content: str, sample: int) -> Completion | None:
        if not self._readable:
            return None
        try:
            value = self._store.find(entry_key(self._profile, content, sample))
        except CacheError as error:
            self._readable = self._writable = False
            self._say(f"{error}. The run goes on without it")
            return None
        try:
            return None if value is None else unpack(value, request, sample)
        except (ValueError, TypeError, zlib.error, RecursionError):  # its digest is right, so a stranger made it
            return None

    def add(self, completions: Iterable[Completion]) -> None:
        """Keep completions that a later run can take: not errors, and not those of unverified requests."""
        if not self._writable:
            return
        self._new += [
            New(entry_key(self._profile, content, each.sample), len(each.token_ids), pack(each))
            for each in completions
            if each.error is None and (content := self._content(each.request)) is not None
        ]
        if len(self._new) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what was added; from now on other processes find it."""
        if not self._new:
            return
        new, self._new = self._new, []
        try:
            self._store.add(self._profile, self._model, new)
        except CacheError as error:
            self._writable = False
            self._say(f"{error}. The run goes on, and what it makes is not kept there")
