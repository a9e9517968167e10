"""Files that are written in blocks, from the start, with their digests."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from detgen.outputs.compressed import COMPRESSED, frame_of
from detgen.outputs.directory import digest, write_all, writing
from detgen.outputs.folder import OutputFolder

_BLOCK = 1 << 20


class DigestedFile:
    """A file that is written from the start.

    Args:
        file: its descriptor.

    Raises:
        OSError: by every method that writes, if it cannot.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._block = bytearray()
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Add bytes, which are there after the next `flush`."""
        self._block += data
        if len(self._block) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        write_all(self._file, self._block)
        self._sha256.update(self._block)
        self._size += len(self._block)
        self._block.clear()

    def described(self) -> dict[str, Any]:
        """What is written, as a manifest has it: "sha256" and "bytes"."""
        return {"sha256": self._sha256.hexdigest(), "bytes": self._size}


class LogFile(DigestedFile):
    """A file of an output folder, to which lines are added while a run goes on.

    Args:
        folder: the run's.
        name: of the file.

    Raises:
        OutputError: by every method that writes, if it cannot.
    """

    def __init__(self, folder: OutputFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        with writing(self._path):
            super().__init__(folder.directory.create(name))

    @property
    def _path(self) -> Path:
        return self._folder.path / self.name

    def flush(self) -> None:
        """As `DigestedFile.flush`."""
        with writing(self._path):
            super().flush()

    def sync(self) -> dict[str, Any]:
        """Make what is written durable; it as `described`."""
        with writing(self._path):
            os.fsync(self._file)
        return self.described()

    def damage(self) -> str | None:
        """What something else did to the file; None if it is as it was written."""
        if not self._folder.directory.has(self.name):
            return f"{self._path} was deleted"
        if not self._folder.directory.holds(self.name, self._file):
            return f"{self._path} was replaced by another"
        if os.fstat(self._file).st_size != self._size or digest(self._file) != self._sha256.hexdigest():
            return f"{self._path} was changed"
        return None

    def close(self) -> None:
        """Close it."""
        os.close(self._file)


class CompressedLogFile(LogFile):
    """The same of frames that can be read by themselves. They end by how much they hold, whenever that is written."""

    def __init__(self, folder: OutputFolder, name: str) -> None:
        super().__init__(folder, name)
        self._plain = bytearray()

    def write(self, data: bytes) -> None:
        """As `DigestedFile.write`; what does not fill a frame is there after the next `sync`."""
        self._plain += data
        if len(self._plain) >= _BLOCK:
            self._end_frame()

    def sync(self) -> dict[str, Any]:
        """As `LogFile.sync`."""
        if self._plain:
            self._end_frame()
            self.flush()
        return super().sync()

    def _end_frame(self) -> None:
        super().write(frame_of(bytes(self._plain)))
        self._plain.clear()


def log_file(folder: OutputFolder, name: str) -> LogFile:
    """A file of a folder, compressed if its name says so."""
    return (CompressedLogFile if name.endswith(COMPRESSED) else LogFile)(folder, name)
