"""Prompts in one file: text formats, compressed or not, and Parquet."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from detgen.errors import PromptsError
from detgen.prompts.base import Inspection, Prompts
from detgen.prompts.formats import FORMATS
from detgen.prompts.table import check_columns, import_package, plain_row

_CHUNK = 1 << 20


class FilePrompts(Prompts):
    """A file that may not change while it is read."""

    def __init__(self, path: Path, given: str, name: str, stem: str, format: str) -> None:
        """Note where it is; nothing is read yet."""
        super().__init__(given, name, stem, format, path)
        self._file = path
        self._inspected: tuple[int, int] | None = None

    def check_unchanged(self) -> None:
        """Make sure that what was read is what was inspected.

        Raises:
            PromptsError: the file changed meanwhile.
        """
        with self._reading():
            if self._inspected is not None and self._stamp() != self._inspected:
                raise PromptsError(
                    f"{self.given} changed while it was read; run again with --overwrite or another output folder"
                )

    def inspect(self) -> Inspection:
        """Read the file once, to count and digest it.

        Raises:
            PromptsError: it cannot be read, or holds no prompts.
        """
        with self._reading():
            self._inspected = self._stamp()
            inspection = self._inspect()
        if not inspection.prompts:
            raise PromptsError(f"no prompts in {self.given}")
        return inspection

    def _inspect(self) -> Inspection:
        raise NotImplementedError

    def _stamp(self) -> tuple[int, int]:
        stat = self._file.stat()
        return stat.st_size, stat.st_mtime_ns

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PromptsError(f"{self.given} is damaged and cannot be decompressed: {error}") from None
        except OSError as error:
            raise PromptsError(f"cannot read {self.given}: {error.strerror or error}") from None


class TextPrompts(FilePrompts):
    """A file of one of the text formats, compressed or not."""

    def __init__(self, path: Path, given: str, name: str, stem: str, format: str, compression: str = "") -> None:
        """Note where it is; nothing is read yet. `compression` is "gz", "zst" or nothing."""
        super().__init__(path, given, name, stem, format)
        self._format = FORMATS[format]
        self._compression = compression

    def items(self) -> Iterator[tuple[int, Any]]:
        """Each line, element or row undecoded, with its number.

        Raises:
            PromptsError: the file cannot be read (on).
        """
        with self._reading(), self._file.open("rb") as file:
            yield from self._format.items(self._decompressed(file), self.given)

    def decode(self, item: Any) -> object:
        """What an item says.

        Raises:
            RequestError: nothing that could be understood.
        """
        return self._format.decode(item)

    def _inspect(self) -> Inspection:
        with self._file.open("rb", buffering=0) as raw:
            file = io.BufferedReader(cast("io.RawIOBase", hashing := _Hashing(raw)), _CHUNK)
            count = sum(1 for _ in self._format.items(self._decompressed(file), self.given))
            while file.read(_CHUNK):  # what may follow behind the compressed part
                pass
            return Inspection(hashing.sha256.hexdigest(), count)

    def _decompressed(self, file: BinaryIO) -> BinaryIO:
        if self._compression == "gz":
            return cast("BinaryIO", io.BufferedReader(gzip.GzipFile(fileobj=file), _CHUNK))
        if self._compression == "zst":
            return cast("BinaryIO", io.BufferedReader(_Blocks(self._zst_blocks(file)), _CHUNK))
        return file

    def _zst_blocks(self, file: BinaryIO) -> Iterator[bytes]:
        # zstandard's own stream reader takes a file that was cut off for a whole one.
        zstandard = import_package("zstandard", "zstandard", self.given)
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        frame = None
        try:
            while chunk := file.read(1 << 16):
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


class ParquetPrompts(FilePrompts):
    """A Parquet file, read a batch of rows at a time."""

    def items(self) -> Iterator[tuple[int, Any]]:
        """Each row, with its number.

        Raises:
            PromptsError: the file cannot be read (on).
        """
        number = 0
        with self._table() as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row

    def decode(self, item: Any) -> object:
        """The row as JSON could carry it."""
        return plain_row(item)

    def _inspect(self) -> Inspection:
        with self._table() as table:
            check_columns(self.given, table.schema_arrow.names, remedy="rename the one that holds the prompts")
            count = table.metadata.num_rows
        with self._file.open("rb") as file:
            return Inspection(hashlib.file_digest(file, "sha256").hexdigest(), count)

    @contextmanager
    def _table(self) -> Iterator[Any]:
        parquet = import_package("pyarrow", "pyarrow.parquet", self.given)
        arrow = import_package("pyarrow", "pyarrow", self.given)
        try:
            with self._reading(), parquet.ParquetFile(self._file) as table:
                yield table
        except arrow.ArrowException as error:
            raise PromptsError(f"{self.given} is not a Parquet file that can be read: {error}") from None


class _Hashing(io.RawIOBase):
    """A file that is digested while it is read."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.sha256.update(memoryview(buffer)[:count])
        return count


class _Blocks(io.RawIOBase):
    """A file made of the blocks of an iterator."""

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
