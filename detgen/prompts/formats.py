"""The text formats: how a stream of bytes is cut into items, and the value of an item.

Cutting is separate from decoding, so that counting the prompts of a file is cheap.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, BinaryIO

from detgen.errors import PromptsError, RequestError
from detgen.prompts.array import array_elements
from detgen.prompts.json_text import RepeatedKeyError, parse_json
from detgen.prompts.keys import BOOLEANS, INTEGERS, KEYS, NUMBERS, STRUCTURES
from detgen.prompts.kinds import CONTENTS
from detgen.prompts.record_values import LONGEST, TOO_LONG
from detgen.prompts.table import check_columns

_Row = tuple[list[str], list[str] | csv.Error]  # the names of the columns, and the cells or why there are none

_PART = 1 << 20  # of a line that is passed over
_BOM = b"\xef\xbb\xbf"
_ESCAPED_LETTERS = (b"\\u005", b"\\u006", b"\\u007")  # of the name of a key


@dataclass(frozen=True, slots=True)
class Format:
    """A text format.

    Attributes:
        items: cuts a stream, which errors call by the second argument, into items with their numbers; the third one
            is the column of the prompts, if it has another name than usual. An empty item stands for one that is too
            long to be held.
        decode: the value of an item; raises RequestError.
        may_have_id: whether an item may have an id that is a string; quicker than `decode`, and right if it says no.
        may_be_batch: whether it may be a batch request that has an id; likewise.
        table: whether the first line names columns.
    """

    items: Callable[[BinaryIO, str, str | None], Iterator[tuple[int, Any]]]
    decode: Callable[[Any], object]
    may_have_id: Callable[[Any], bool]
    may_be_batch: Callable[[Any], bool] = lambda item: False
    table: bool = False


def _text(line: bytes) -> str:
    if not line:
        raise RequestError(TOO_LONG)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"not valid UTF-8 at byte {error.start + 1}") from None


def _lines(file: BinaryIO, name: str, column: str | None) -> Iterator[tuple[int, bytes]]:
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


def _decode_json_line(line: bytes) -> object:
    return parse_json(_text(line))


def _decode_text_line(line: bytes) -> object:
    return {"prompt": _text(line)}


def _decode_element(text: str) -> object:
    if not text:
        raise RequestError(TOO_LONG)
    value = parse_json(_valid(text))
    return {"prompt": value} if isinstance(value, str) else value


def _valid(text: str) -> str:
    """Refuse what `surrogateescape` let through."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("not valid UTF-8") from None
    return text


def _elements(file: BinaryIO, name: str, column: str | None) -> Iterator[tuple[int, str]]:
    return array_elements(file, name)


def _rows(file: BinaryIO, name: str, column: str | None, delimiter: str) -> Iterator[tuple[int, _Row]]:
    """The rows of a table, each with the header; a row's number is that of the line it starts on."""
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the default of 128 KiB
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        lines = _RowLines(text, name)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = [cell.strip() for cell in next(filter(None, reader), [])]
        except csv.Error as error:
            raise PromptsError(f"{name}: its first line is not a CSV header: {error}") from None
        if header:
            check_columns(
                name, header, column, remedy="rename one of them in the first line, or name it with --prompt-column"
            )
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


class _RowLines:
    """The lines of a table, of which one row is held at a time.

    Args:
        text: the table.
        name: what errors call it.

    Attributes:
        held: characters of the row that is read.
    """

    def __init__(self, text: io.TextIOWrapper, name: str) -> None:
        self._text, self._name, self._line = text, name, 0
        self.held = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next line.

        Raises:
            PromptsError: the row is too long; where it ends is not known, since line breaks may be quoted.
        """
        line = self._text.readline(LONGEST - self.held + 1)
        if not line:
            raise StopIteration
        self.held += len(line)
        self._line += 1
        if self.held > LONGEST:
            raise PromptsError(f"{self._name}:{self._line}: the row is {TOO_LONG}; a quote may be missing before")
        return line


def _decode_row(item: _Row, delimiter: str) -> object:
    header, row = item
    if isinstance(row, csv.Error):
        raise RequestError(f"not valid CSV: {row}")
    if len(row) > len(header):
        raise RequestError(f"{len(row)} cells under {len(header)} columns; quote a cell that holds a {delimiter}")
    record: dict[str, Any] = {name: _cell(name, cell) for name, cell in zip(header, row, strict=False)}
    if all(record.get(name) is None for name in CONTENTS):
        record["prompt"] = ""  # an empty cell means the default elsewhere, here an empty prompt
    return record


def _cell(name: str, cell: str) -> object:
    """A cell as the type of its column; what does not parse stays a string, for the parameter's own check."""
    _valid(cell)
    if name not in KEYS:
        return cell
    if not cell:
        return None
    beginnings = ("[",) if name == "stop" else ("[", "{")  # a text may well end before a brace
    if name in ("messages", "prompt_token_ids") or (name in STRUCTURES and cell.startswith(beginnings)):
        try:
            return parse_json(cell)
        except RequestError as error:
            if name == "metadata" and not isinstance(error, RepeatedKeyError):
                return cell  # as any other text that it may hold
            raise RequestError(f"{name}: {error}") from None
    if name in BOOLEANS:
        return {"true": True, "1": True, "false": False, "0": False}.get(cell.strip().lower(), cell)
    if name not in NUMBERS:
        return cell
    try:
        number = float(cell)
    except ValueError:
        return cell
    if name in INTEGERS and number.is_integer():
        return int(cell) if cell.strip().lstrip("+-").isdecimal() else int(number)
    return number


def _json_line_may_have_id(line: bytes) -> bool:
    return b'"id"' in line or b"\\u00" in line  # the name of a key may be escaped


def _element_may_have_id(text: str) -> bool:
    return '"id"' in text or "\\u00" in text


def _json_line_may_be_batch(line: bytes) -> bool:
    return b'"custom_id"' in line or (b"\\u00" in line and any(start in line for start in _ESCAPED_LETTERS))


def _element_may_be_batch(text: str) -> bool:
    return _json_line_may_be_batch(text.encode("utf-8", "surrogatepass"))


def _row_may_have_id(item: _Row) -> bool:
    return "id" in item[0]


def _table(delimiter: str, name: str) -> Format:
    return Format(
        partial(_rows, delimiter=delimiter), partial(_decode_row, delimiter=name), _row_may_have_id, table=True
    )


FORMATS = {
    "jsonl": Format(_lines, _decode_json_line, _json_line_may_have_id, _json_line_may_be_batch),
    "json": Format(_elements, _decode_element, _element_may_have_id, _element_may_be_batch),
    "txt": Format(_lines, _decode_text_line, lambda line: False),
    "csv": _table(",", "comma"),
    "tsv": _table("\t", "tab"),
}
