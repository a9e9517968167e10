"""Prompts in one file, compressed or not, that is read from its beginning."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from detgen.errors import PromptsError
from detgen.prompts.batch import Repeated, custom_id
from detgen.prompts.source import Inspection, Prompts

_CHUNK = 1 << 20
_COMPRESSED = 256  # bytes of zstandard that are read at a time: four of them may become 128 KiB


@dataclass(eq=False)
class FilePrompts(Prompts):
    """A file, which may not change while it is read.

    Attributes:
        compression: "gz", "zst" or "".
    """

    path: Path
    compression: str = ""
    _inspected: tuple[int, int] | None = None

    def inspect(self) -> Inspection:
        """Read the file to count and digest it.

        Raises:
            PromptsError: if it cannot be read, or holds no prompts.
        """
        with self._reading():
            self._inspected = self._stamp()
            count = self.count()
            with self.path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not count:
            raise PromptsError(f"no prompts in {self.given}")
        return Inspection(sha256, count)

    def check_unchanged(self) -> None:
        """Raise if the file changed after it was inspected.

        Raises:
            PromptsError: if so.
        """
        with self._reading():
            if self._inspected is not None and self._stamp() != self._inspected:
                raise PromptsError(
                    f"{self.given} changed while it was read; run again with --overwrite or another output folder"
                )

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield each record, not decoded, with its number.

        Raises:
            PromptsError: if the file, or the rest of it, cannot be read.
        """
        with self._reading(), self.path.open("rb") as file:
            yield from self.cut(self._decompressed(file))

    @abstractmethod
    def cut(self, file: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Split a stream into items with their numbers; an empty item stands for one that is too long to hold."""

    def may_have(self, key: str, item: Any) -> bool:
        """Return whether an item's record may have this key; quicker than `decode`, and reliable if false."""
        return False

    def count(self) -> int:
        """Return the number of records; also note what ids they have."""
        count, ids = 0, Repeated()
        for _, item in self.items():
            count += 1
            if self.may_have("custom_id", item) or (not self._string_ids and self.may_have("id", item)):
                record, _ = self.decoded(item)
                if (id := custom_id(record)) is not None:
                    ids.add(id)
                own = record.get("id") if isinstance(record, dict) else None
                self._string_ids = self._string_ids or id is not None or isinstance(own, str)
        self._repeated = ids.found()
        return count

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PromptsError(f"{self.given} is damaged and cannot be decompressed: {error}") from None
        except OSError as error:
            raise PromptsError(f"cannot read {self.given}: {error.strerror or error}") from None

    def _stamp(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns

    def _decompressed(self, file: BinaryIO) -> BinaryIO:
        if not self.compression:
            return file
        raw = gzip.GzipFile(fileobj=file) if self.compression == "gz" else _Blocks(zst_blocks(file, self.given))
        return cast("BinaryIO", io.BufferedReader(raw, _CHUNK))


def zst_blocks(file: BinaryIO, given: str) -> Iterator[bytes]:
    """Decompress a zstandard file in blocks of up to 128 KiB, or a few of them.

    Args:
        file: the compressed file.
        given: name of the file in errors.

    Raises:
        zlib.error: if it is damaged, after the valid part was yielded.
        EOFError: if it is truncated, likewise.
    """
    # zstandard's own stream reader accepts truncated files.
    zstandard = import_package("zstandard", given)
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    try:
        while chunk := file.read(_COMPRESSED):
            while chunk:
                frame = frame or decompressor.decompressobj()
                if block := frame.decompress(chunk):
                    yield block
                chunk = b""
                if frame.eof:
                    chunk, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from None
    if frame is not None:
        raise EOFError("it ends in the middle")


class _Blocks(io.RawIOBase):
    """A file that consists of the blocks of an iterator."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def import_package(module: str, given: str) -> Any:
    """Import a module that only some inputs need.

    Raises:
        PromptsError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PromptsError(f"{given}: reading it needs the package {package}: pip install {package}") from None
