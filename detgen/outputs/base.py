"""Durable writes with helpful errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detgen.errors import OutputError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a message that names the file.

    Raises:
        OutputError: for any OSError inside the block.
    """
    try:
        yield
    except OSError as error:
        first = "free some space" if error.errno in _FULL else "fix that"
        reason = error.strerror or str(error)
        message = f"cannot write {path}: {reason}; {first}, then run the same command again to resume"
        raise OutputError(message) from error


def write_all(file: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a file descriptor, without a buffer that could fail later."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """The descriptor of a new, empty file, durable after the block; an OSError passes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, finds either the old content or the new.

    Raises:
        OutputError: it cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    with writing(path):
        with new_file(draft) as file:
            write_all(file, data)
        draft.replace(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make added, replaced and removed file names durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
