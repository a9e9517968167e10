"""A file that says how far a run is, for whoever polls it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from detgen.errors import RunError
from detgen.progress import Observer, Progress

_INTERVAL = 1.0  # seconds between two versions of the file


class StatusFile:
    """An `Observer` that keeps a JSON object in a file, and hands all that it is told to another.

    A reader finds a whole object at any time: each version takes the place of the one before. The keys are `state`
    (running, finished, already finished, interrupted or failed), `updated` (seconds since 1970), `stage`, those of the
    latest `Progress`, and `error` where it failed. A context manager; whoever leaves it by an exception has failed.

    Args:
        path: of the file.
        observer: the other.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, observer: Observer) -> None:
        self._path, self._observer = path, observer
        self._said: dict[str, Any] = {"state": "running", "stage": "starting"}
        self._written = 0.0
        self._write()
        self.message = observer.message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.end("interrupted")
        elif error is not None:
            self._said["error"] = str(error)
            self.end("failed")

    def stage(self, text: str) -> None:
        """Note what begins."""
        self._said = {"state": "running", "stage": text}
        self._write()
        self._observer.stage(text)

    def progress(self, progress: Progress) -> None:
        """Note how far it is, once a second at most."""
        self._said |= asdict(progress)
        if time.monotonic() - self._written >= _INTERVAL:
            self._write()
        self._observer.progress(progress)

    def end(self, state: str) -> None:
        """Note how it ended."""
        self._said["state"] = state
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        made = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            made.write_text(json.dumps({**self._said, "updated": round(time.time(), 3)}) + "\n", encoding="utf-8")
            os.replace(made, self._path)
        except OSError as error:
            made.unlink(missing_ok=True)
            raise RunError(f"cannot write {self._path}: {error.strerror}") from None
