"""Files that are written in blocks, from the start, with their digests.

An acceptance log may be compressed; readers need not know.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from detgen.outputs.directory import digest, write_all, writing
from detgen.outputs.folder import OutputFolder
from detgen.prompts.files import zst_blocks

COMPRESSED = ".zst"
_LEVEL = 3
_GIVEN_OUT = 4 << 20  # bytes to yield at a time
_BLOCK = 1 << 20


class DamagedError(ValueError):
    """A compressed file is damaged."""


class TornError(DamagedError):
    """A compressed file is incomplete, as after a run that was killed."""


def frame_of(data: bytes) -> bytes:
    """Return bytes as a compressed frame with a checksum; concatenated frames make a file."""
    import zstandard

    made: bytes = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
    return made


def contents(file: BinaryIO, name: str, see: Callable[[bytes], None] = lambda data: None) -> Iterator[bytes]:
    """Yield the content of a file in blocks, decompressed if its name has the ending of compressed files.

    Args:
        file: the file, open for reading.
        name: its name.
        see: receives the file's own bytes, all of them if the blocks are read to the end or to the error.

    Raises:
        TornError, DamagedError: if a compressed file is incomplete or damaged; everything before that is yielded first.
    """
    source = _Seen(file, see)
    if not name.endswith(COMPRESSED):
        while data := source.read(_GIVEN_OUT):
            yield data
        return
    held = bytearray()
    fault: DamagedError | None = None
    blocks = zst_blocks(cast("BinaryIO", source), name)
    while fault is None:
        try:
            block = next(blocks, b"")
        except EOFError as error:
            fault = TornError(str(error))
        except zlib.error as error:
            fault = DamagedError(f"it is damaged ({error})")
        else:
            held += block
            if block and len(held) < _GIVEN_OUT:
                continue
            if not block:
                break
        if held:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)
    while source.read(_GIVEN_OUT):
        pass
    if fault is not None:
        raise fault


class _Seen:
    """A file that passes its bytes on to a function as they are read."""

    def __init__(self, file: BinaryIO, see: Callable[[bytes], None]) -> None:
        self._file, self._see = file, see

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._file.read(size)
        self._see(data)
        return data


class DigestedFile:
    """A file that is written from the start, with a running digest.

    Args:
        file: its descriptor.

    Raises:
        OSError: by every method that writes, on failure.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._block = bytearray()
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Add bytes; they are in the file after the next `flush`."""
        self._block += data
        if len(self._block) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write the bytes that were added."""
        write_all(self._file, self._block)
        self._sha256.update(self._block)
        self._size += len(self._block)
        self._block.clear()

    def described(self) -> dict[str, Any]:
        """Return "sha256" and "bytes" of what is written, as in a manifest."""
        return {"sha256": self._sha256.hexdigest(), "bytes": self._size}


class LogFile(DigestedFile):
    """A file of an output folder to which lines are added during a run.

    Args:
        folder: the run's folder.
        name: name of the file.

    Raises:
        OutputError: by every method that writes, on failure.
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
        """See `DigestedFile.flush`."""
        with writing(self._path):
            super().flush()

    def sync(self) -> dict[str, Any]:
        """Make what is written durable, and return it as `described` does."""
        with writing(self._path):
            os.fsync(self._file)
        return self.described()

    def damage(self) -> str | None:
        """Return what others did to the file; None if it is as it was written."""
        if not self._folder.directory.has(self.name):
            return f"{self._path} was deleted"
        if not self._folder.directory.holds(self.name, self._file):
            return f"{self._path} was replaced by another"
        if os.fstat(self._file).st_size != self._size or digest(self._file) != self._sha256.hexdigest():
            return f"{self._path} was changed"
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class CompressedLogFile(LogFile):
    """A log file of compressed frames. Where a frame ends depends on its content, not on when it is written."""

    def __init__(self, folder: OutputFolder, name: str) -> None:
        super().__init__(folder, name)
        self._plain = bytearray()

    def write(self, data: bytes) -> None:
        """See `DigestedFile.write`; bytes that do not fill a frame are in the file after the next `sync`."""
        self._plain += data
        if len(self._plain) >= _BLOCK:
            self._end_frame()

    def sync(self) -> dict[str, Any]:
        """See `LogFile.sync`."""
        if self._plain:
            self._end_frame()
            self.flush()
        return super().sync()

    def _end_frame(self) -> None:
        super().write(frame_of(bytes(self._plain)))
        self._plain.clear()


def log_file(folder: OutputFolder, name: str) -> LogFile:
    """Create a log file in a folder, compressed if its name has the ending of compressed files."""
    return (CompressedLogFile if name.endswith(COMPRESSED) else LogFile)(folder, name)
