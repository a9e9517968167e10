"""A status file for programs that poll a run's progress."""

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
    """An `Observer` that keeps a JSON object in a file and forwards everything to another observer.

    A reader always finds a complete object, since each version replaces the one before. The keys are `state` (running,
    finished, already finished, interrupted or failed), `updated` (seconds since 1970), `stage`, those of the latest
    `Progress`, and `error` after a failure. A context manager; leaving it by an exception means failure.

    Args:
        path: path of the file.
        observer: the other observer.

    Raises:
        RunError: if the file cannot be written.
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
        """Record a new stage."""
        self._said = {"state": "running", "stage": text}
        self._write()
        self._observer.stage(text)

    def progress(self, progress: Progress) -> None:
        """Record progress, at most once a second."""
        self._said |= asdict(progress)
        if time.monotonic() - self._written >= _INTERVAL:
            self._write()
        self._observer.progress(progress)

    def end(self, state: str) -> None:
        """Record how the run ended."""
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
