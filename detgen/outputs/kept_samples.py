"""The finished samples of a run that has stopped, for those who only look: the folder stays as it is."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from detgen.engine.request import Request
from detgen.errors import StoreError
from detgen.outputs.directory import open_plain
from detgen.outputs.samples import Sample, Samples
from detgen.outputs.store import STORE, Store, beside


class KeptSamples:
    """A copy of a folder's store, with what a killed run had not brought into it yet; `with` makes and deletes it.

    Args:
        folder: the output folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: Store | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        place = Path(self._opened.enter_context(TemporaryDirectory(prefix="detgen-"))) / STORE
        with suppress(OSError, StoreError):
            for name in (STORE, *beside(STORE)):
                with (
                    suppress(FileNotFoundError),
                    open(open_plain(self._folder / name), "rb") as source,
                    place.with_name(name).open("wb") as target,
                ):
                    shutil.copyfileobj(source, target)
            if place.exists():
                self._store = Store(place, lone=True)
                self._opened.callback(self._store.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def count(self) -> int:
        """How many samples there are, as far as the store can be read."""
        with suppress(StoreError):
            return 0 if self._store is None else self._store.count()
        return 0

    def find(
        self, request: Request, sample: int, manifest: dict[str, Any], source: str, *, dated: bool
    ) -> Sample | None:
        """A sample of the run; None if it is not there.

        Args:
            request: the request.
            sample: which of its samples.
            manifest: the run's.
            source: what errors call the input.
            dated: whether the text of a chat has the day in it.
        """
        with suppress(StoreError):
            samples = Samples(self._store, None, manifest, source, dated=dated)
            if sample in (found := samples.take_own(request, [sample])):
                return found[sample][1]
        return None
