"""The lock of an output folder: one run at a time, and a run that notices when the folder is no longer its own."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from detgen.errors import OutputError
from detgen.outputs.directory import Directory, NotPlainError


class FolderLostError(OutputError):
    """The folder was deleted, or is no longer this run's; nothing more may be changed in it."""


class Hold:
    """A lock, held from its making on.

    A separate file, since not every file system can lock a folder.

    Attributes:
        path: where the folder is.

    Raises:
        BlockingIOError: another run holds it.
        OutputError: the lock's place is taken.
        OSError: the folder cannot be locked.
    """

    NAME = ".lock"

    def __init__(self, directory: Directory, path: Path) -> None:
        self.path = path
        self._directory = directory
        # Unlocking deletes the file, so the one that was locked may be gone by now: then try again with a new one.
        while True:
            try:
                self._file = directory.open(self.NAME, os.O_RDWR | os.O_CREAT)
            except NotPlainError as error:
                raise OutputError(f"cannot lock {path}: {error.strerror}; remove it first") from error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if directory.holds(self.NAME, self._file):
                    return
            except OSError:
                os.close(self._file)
                raise
            os.close(self._file)

    def lost(self) -> str | None:
        """What has become of the folder if it is no longer this run's; None if it is."""
        if self._directory.holds(self.NAME, self._file):
            return None
        if self._directory.deleted():
            return f"{self.path} was deleted while the run used it"
        if self._directory.has(self.NAME):
            return f"{self.path} was taken by another run, after its lock had been deleted"
        return f"{self.path / self.NAME} was deleted while the run used it"

    def release(self) -> None:
        """Delete the lock; only while it is held."""
        self._directory.remove(self.NAME)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)
