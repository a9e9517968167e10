"""Prompts in one file: text formats, compressed or not, and Parquet."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from detgen.errors import PromptsError, RequestError
from detgen.prompts.batch import Repeated, custom_id
from detgen.prompts.formats import FORMATS
from detgen.prompts.json_text import RepeatedKeyError
from detgen.prompts.record_source import Inspection, Prompts
from detgen.prompts.table import check_columns, import_package, plain_row

_CHUNK = 1 << 20
_COMPRESSED = 256  # bytes of zstandard that are read at a time: four of them may become 128 KiB


class FilePrompts(Prompts):
    """A file that may not change while it is read."""

    path: Path
    _inspected: tuple[int, int] | None = None

    def inspect(self) -> Inspection:
        """Read the file, to count and digest it.

        Raises:
            PromptsError: it cannot be read, or holds no prompts.
        """
        with self._reading():
            self._inspected = self._stamp()
            count = self._count()
            with self.path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not count:
            raise PromptsError(f"no prompts in {self.given}")
        return Inspection(sha256, count)

    def check_unchanged(self) -> None:
        """Make sure that what was read is what was inspected.

        Raises:
            PromptsError: the file changed in between.
        """
        with self._reading():
            if self._inspected is not None and self._stamp() != self._inspected:
                raise PromptsError(
                    f"{self.given} changed while it was read; run again with --overwrite or another output folder"
                )

    @abstractmethod
    def _count(self) -> int:
        """The number of records."""

    def _stamp(self) -> tuple[int, int]:
        stat = self.path.stat()
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

    def __init__(
        self,
        given: str,
        name: str,
        stem: str,
        format: str,
        path: Path,
        column: str | None = None,
        compression: str = "",
    ) -> None:
        """Note where it is; nothing is read yet. `compression` is "gz", "zst" or nothing."""
        super().__init__(given, name, stem, format, path, column)
        self._format = FORMATS[format]
        self._compression = compression

    def items(self) -> Iterator[tuple[int, Any]]:
        """Each line, element or row, not decoded, with its number.

        Raises:
            PromptsError: the file, or the rest of it, cannot be read.
        """
        with self._reading(), self.path.open("rb") as file:
            yield from self._format.items(self._decompressed(file), self.given, self.column)

    def decode(self, item: Any) -> object:
        """The value of an item.

        Raises:
            RequestError: it has none.
        """
        return self._format.decode(item)

    def _count(self) -> int:
        count, ids = 0, Repeated()
        for _, item in self.items():
            count += 1
            may_be_batch = self._format.may_be_batch(item)
            if not may_be_batch and (self._string_ids or not self._format.may_have_id(item)):
                continue
            record = self._record(item)
            if (id := custom_id(record)) is not None:
                ids.add(id)
            self._string_ids = self._string_ids or id is not None or isinstance(record.get("id"), str)
        self._repeated = ids.found()
        return count

    def _record(self, item: Any) -> dict[str, Any]:
        """An item's record; an empty one if it has none."""
        try:
            record = self.decode(item)
        except RepeatedKeyError as error:
            record = error.value
        except RequestError:
            return {}
        return record if isinstance(record, dict) else {}

    def _decompressed(self, file: BinaryIO) -> BinaryIO:
        if self._compression == "gz":
            return cast("BinaryIO", io.BufferedReader(gzip.GzipFile(fileobj=file), _CHUNK))
        if self._compression == "zst":
            return cast("BinaryIO", io.BufferedReader(_Blocks(zst_blocks(file, self.given)), _CHUNK))
        return file


class ParquetPrompts(FilePrompts):
    """A Parquet file, read a batch of rows at a time."""

    def items(self) -> Iterator[tuple[int, Any]]:
        """Each row, with its number.

        Raises:
            PromptsError: the file, or the rest of it, cannot be read.
        """
        with self._table() as table:
            batches = table.iter_batches(batch_size=1024)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)

    def decode(self, item: Any) -> object:
        """The row as JSON could carry it."""
        return plain_row(item)

    def _count(self) -> int:
        with self._table() as table:
            columns = table.schema_arrow.names
            check_columns(
                self.given,
                columns,
                self.column,
                remedy="rename the one that holds the prompts, or name it with --prompt-column",
            )
            if "id" in columns:
                batches = table.iter_batches(batch_size=1024, columns=["id"])
                self._string_ids = any(isinstance(id, str) for batch in batches for id in batch.column(0).to_pylist())
            return int(table.metadata.num_rows)

    @contextmanager
    def _table(self) -> Iterator[Any]:
        parquet = import_package("pyarrow", "pyarrow.parquet", self.given)
        arrow = import_package("pyarrow", "pyarrow", self.given)
        try:
            with self._reading(), parquet.ParquetFile(self.path) as table:
                yield table
        except arrow.ArrowException as error:
            raise PromptsError(f"{self.given} is not a Parquet file that can be read: {error}") from None


def zst_blocks(file: BinaryIO, given: str) -> Iterator[bytes]:
    """What a file compressed by zstandard holds, in blocks of up to 128 KiB or a few of them.

    Args:
        file: the compressed bytes.
        given: what an error calls the file.

    Raises:
        zlib.error: it is damaged, behind what was yielded.
        EOFError: it ends in the middle, likewise.
    """
    # zstandard's own stream reader takes a truncated file for a whole one.
    zstandard = import_package("zstandard", "zstandard", given)
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
