"""Digests of a model's files; large files take a while, so an observer receives progress."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from detgen.models.folders import model_files
from detgen.progress import Observer, Progress

_SOON = 1.0  # seconds; work that is done sooner needs no progress report
_PART = 1 << 20


class Told:
    """Reports the progress of reading to an observer.

    Args:
        total: number of bytes to read.
        observer: receives progress, after the first second.
    """

    def __init__(self, total: int, observer: Observer) -> None:
        self._total, self._observer = total, observer
        self._started = time.monotonic()

    def tell(self, done: float) -> None:
        """Report that this many bytes have been read."""
        seconds = time.monotonic() - self._started
        if seconds >= _SOON:
            left = seconds * (self._total - done) / done if done else None
            sizes = round(done / 1e6), max(round(self._total / 1e6), 1)
            self._observer.progress(Progress(*sizes, "MB", seconds, left))


def digests(files: Sequence[Path], observer: Observer) -> list[str]:
    """Return SHA-256 of each file, in hexadecimal."""
    told, done, found = Told(sum(path.stat().st_size for path in files), observer), 0, []
    buffer = memoryview(bytearray(_PART))
    for path in files:
        total = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total.update(buffer[:count])
                done += count
                told.tell(done)
        found.append(total.hexdigest())
    return found


def model_digest(place: Path, observer: Observer, *, trusted: bool) -> str:
    """Return SHA-256 of a file, or over names and contents of a folder's files that can change an output, by name."""
    if place.is_file():
        return digests([place], observer)[0]
    files = model_files(place, trusted=trusted)
    lines = [
        f"{file.relative_to(place).as_posix()} {digest}\n"
        for file, digest in zip(files, digests(files, observer), strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
