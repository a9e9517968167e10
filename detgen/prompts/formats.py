"""The formats of a file: how it is split into records, how they are decoded, and which reader a name means.

Splitting is separate from decoding, so that counting the prompts of a file is cheap.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from detgen.errors import PromptsError, RequestError
from detgen.prompts.array import LONGEST, array_elements
from detgen.prompts.dataset import DatasetPrompts, check_columns, read_cell, read_row
from detgen.prompts.files import FilePrompts, import_package
from detgen.prompts.json_text import parse_json
from detgen.prompts.kinds import CONTENTS
from detgen.prompts.source import Prompts

_Row = tuple[list[str], list[str] | csv.Error]  # names of the columns, and the cells or why there are none

_TOO_LONG = "longer than 64 MiB, the most that is read; shorten the prompt, or divide it"
_PART = 1 << 20  # bytes of a skipped line that are read at a time
_BOM = b"\xef\xbb\xbf"
_QUOTED = {key: f'"{key}"'.encode() for key in ("id", "custom_id")}
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")  # in the name of a key
_DELIMITERS = {"csv": (",", "comma"), "tsv": ("\t", "tab")}
_RENAME = "or name it with --prompt-column"


class TextLines(FilePrompts):
    """Plain text, a prompt per line."""

    def cut(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank."""
        for number in count(1):
            line = file.readline(LONGEST + 1)
            if not line:
                return
            if len(line) > LONGEST:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_PART)
                yield number, b""
                continue
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line.rstrip(b"\r\n")

    def decode(self, item: Any) -> object:
        """Return the prompt of a line."""
        return {"prompt": _text(item)}


class JsonLines(TextLines):
    """JSON lines."""

    def decode(self, item: Any) -> object:
        """Return the value of a JSON text."""
        return parse_json(_text(item))

    def may_have(self, key: str, item: bytes) -> bool:
        """Return whether the key, which may be escaped, is somewhere in the text."""
        return _QUOTED[key] in item or (b"\\u00" in item and _ESCAPED_LETTER.search(item) is not None)


class JsonArray(JsonLines):
    """A JSON array of records, or of prompts."""

    def cut(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the text of each element."""
        return ((n, text.encode("utf-8", "surrogateescape")) for n, text in array_elements(file, self.given))

    def decode(self, item: Any) -> object:
        """Return the value of an element."""
        value = super().decode(item)
        return {"prompt": value} if isinstance(value, str) else value


class Table(FilePrompts):
    """CSV or TSV, with the names of the columns in the first line."""

    def cut(self, file: BinaryIO) -> Iterator[tuple[int, _Row]]:
        """Yield each row with the header; a row's number is the line on which it begins."""
        csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the default of 128 KiB
        with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            lines = _RowLines(text, self.given)
            reader = csv.reader(lines, delimiter=_DELIMITERS[self.format][0], strict=True)
            try:
                header = [cell.strip() for cell in next(filter(None, reader), [])]
            except csv.Error as error:
                raise PromptsError(f"{self.given}: its first line is not a CSV header: {error}") from None
            if header:
                check_columns(self.given, header, self.column, f"rename one of them in the first line, {_RENAME}")
            while True:
                line, lines.held = reader.line_num + 1, 0
                try:
                    row: list[str] | csv.Error = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    row = error
                if row:
                    yield line, (header, row)

    def decode(self, item: _Row) -> object:
        """Return a row's cells as values of their columns."""
        header, row = item
        if isinstance(row, csv.Error):
            raise RequestError(f"not valid CSV: {row}")
        if len(row) > len(header):
            delimiter = _DELIMITERS[self.format][1]
            raise RequestError(f"{len(row)} cells under {len(header)} columns; quote a cell that holds a {delimiter}")
        record: dict[str, Any] = {name: read_cell(name, cell) for name, cell in zip(header, row, strict=False)}
        if all(record.get(name) is None for name in CONTENTS):
            record["prompt"] = ""  # elsewhere an empty cell means the default, here an empty prompt
        return record

    def may_have(self, key: str, item: _Row) -> bool:
        """Return whether there is a column of this name."""
        return key in item[0]


class Parquet(FilePrompts):
    """A Parquet file, read a batch of rows at a time."""

    def cut(self, file: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Yield the rows."""
        with self._table(file) as table:
            batches = table.iter_batches(batch_size=1024)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)

    def decode(self, item: Any) -> object:
        """Return the row as JSON-like values."""
        return read_row(item)

    def count(self) -> int:
        """Return the number of rows from the file's metadata; only ids are read."""
        with self.path.open("rb") as file, self._table(file) as table:
            columns = table.schema_arrow.names
            check_columns(self.given, columns, self.column, f"rename the one that holds the prompts, {_RENAME}")
            if "id" in columns:
                batches = table.iter_batches(batch_size=1024, columns=["id"])
                self._string_ids = any(isinstance(id, str) for batch in batches for id in batch.column(0).to_pylist())
            return int(table.metadata.num_rows)

    @contextmanager
    def _table(self, file: BinaryIO) -> Iterator[Any]:
        parquet, arrow = (import_package(module, self.given) for module in ("pyarrow.parquet", "pyarrow"))
        try:
            with parquet.ParquetFile(file) as table:
                yield table
        except arrow.ArrowException as error:
            raise PromptsError(f"{self.given} is not a Parquet file that can be read: {error}") from None


# Readers by file name extension.
FORMATS: dict[str, Callable[..., FilePrompts]] = {
    "jsonl": JsonLines,
    "ndjson": JsonLines,
    "json": JsonArray,
    "txt": TextLines,
    "csv": Table,
    "tsv": Table,
    "parquet": Parquet,
}


class _RowLines:
    """The lines of a table, of which one row is in memory at a time.

    Args:
        text: the table.
        name: name of the table in errors.

    Attributes:
        held: number of characters of the current row.
    """

    def __init__(self, text: io.TextIOWrapper, name: str) -> None:
        self._text, self._name, self._line = text, name, 0
        self.held = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line.

        Raises:
            PromptsError: if the row is too long; its end is unknown, since line breaks may be quoted.
        """
        line = self._text.readline(LONGEST - self.held + 1)
        if not line:
            raise StopIteration
        self.held += len(line)
        self._line += 1
        if self.held > LONGEST:
            raise PromptsError(f"{self._name}:{self._line}: the row is {_TOO_LONG}; a quote may be missing before")
        return line


def _text(line: bytes) -> str:
    if not line:
        raise RequestError(_TOO_LONG)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"not valid UTF-8 at byte {error.start + 1}") from None


_NAME = re.compile(rf"(.+)\.({'|'.join(FORMATS)})(?:(?<!parquet)\.(gz|zst))?", re.IGNORECASE | re.DOTALL)


def open_prompts(given: str, column: str | None = None) -> Prompts:
    """Return the reader of a file, a folder or a dataset on the hub. Nothing is read yet.

    Args:
        given: the path, or "hf://...".
        column: the key or column with the prompts, if its name is not a usual one.

    Raises:
        PromptsError: if there is no such file, no reader for it, or it has no columns.
    """
    if given.startswith("hf://"):
        return DatasetPrompts(given, column)
    path = Path(given)
    try:
        if path.is_dir() or (not path.exists() and Path(given.partition("?")[0]).is_dir()):
            return DatasetPrompts(given, column)
        found = path.exists()
    except OSError as error:  # such as a prompt, which is too long for a file name
        raise PromptsError(f"cannot read {given}: {error.strerror}; name a file with prompts in it") from None
    if not found:
        raise PromptsError(f"there is no file {given}")
    if not path.is_file():  # a pipe would be empty when read again
        raise PromptsError(f"{given} is not a regular file; pass - and pipe to stdin")
    if (name := _NAME.fullmatch(path.name)) is None:
        raise PromptsError(
            f"{given}: its name does not say what it holds; it must end in .jsonl, .ndjson, .json, .txt, .csv or .tsv"
            " (optionally followed by .gz or .zst) or in .parquet; to pipe JSON lines to stdin, pass -"
        )
    stem, ending, compression = name[1], name[2].lower(), (name[3] or "").lower()
    if ending == "txt" and column is not None:
        raise PromptsError(f"{given}: a line of text has no columns; leave out --prompt-column")
    format = "jsonl" if ending == "ndjson" else ending
    return FORMATS[ending](given, path.name, stem, format, path, column, compression)


def spooled_prompts(path: Path, column: str | None = None) -> Prompts:
    """Return the reader of standard input that was kept in `path`; `column` as for `open_prompts`."""
    return JsonLines("standard input", "stdin", "stdin", "jsonl", path, column)
