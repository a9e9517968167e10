"""The rows of tables as records: each column holds the values of the key that it is named after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from detgen.errors import PromptsError, RequestError
from detgen.params import PARAMETERS
from detgen.prompts.json_text import RepeatedKeyError, parse_json
from detgen.prompts.kinds import ALIASES, CONTENTS, KEYS

_NOTHING = object()
# The type of the values of each key; those of `_STRUCTURES` are lists or objects, or may be.
_TYPES: dict[str, type] = {name: parameter.kind for name, parameter in PARAMETERS.items()}
_TYPES |= {alias: _TYPES[name] for alias, name in ALIASES.items()}
_TYPES |= {"id": str, "prompt": str, "continue_final_message": bool, "parallel_tool_calls": bool}
_INTEGERS = [name for name, its in _TYPES.items() if its is int]
_STRUCTURES = KEYS - {name for name, its in _TYPES.items() if its is not tuple} | {"guided_json"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def check_columns(name: str, columns: Iterable[str], column: str | None, remedy: str) -> None:
    """Make sure that a table has a column of prompts.

    Raises:
        PromptsError: it lacks the column that is named or, if none is, all of the usual ones.
    """
    columns = list(columns)
    if column is not None and column not in columns:
        raise PromptsError(f"{name}: no column {column}; choose from {', '.join(columns)}")
    if column is None and not any(each in columns for each in CONTENTS):
        raise PromptsError(f"{name}: no column prompt or messages among {', '.join(columns)}; {remedy}")


def read_cell(name: str, cell: str) -> object:
    """A cell of text as a value of its column; what does not parse stays a string, for the check of the key.

    Raises:
        RequestError: it is not UTF-8, or not the JSON that it must be.
    """
    try:
        cell.encode()
    except UnicodeEncodeError:  # what `surrogateescape` let through
        raise RequestError("not valid UTF-8") from None
    if name not in KEYS:
        return cell
    if not cell:
        return None
    beginnings = ("[",) if name in ("stop", "guided_choice") else ("[", "{")  # a text may well end before a brace
    if name in ("messages", "prompt_token_ids") or (name in _STRUCTURES and cell.startswith(beginnings)):
        try:
            return parse_json(cell)
        except RequestError as error:
            if name == "metadata" and not isinstance(error, RepeatedKeyError):
                return cell  # as any other text that it may hold
            raise RequestError(f"{name}: {error}") from None
    its = _TYPES.get(name)
    if its is bool:
        return _BOOLEANS.get(cell.strip().lower(), cell)
    if its not in (int, float):
        return cell
    try:
        number = float(cell)
    except ValueError:
        return cell
    if its is int and number.is_integer():
        return int(cell) if cell.strip().lstrip("+-").isdecimal() else int(number)
    return number


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of typed columns (Parquet, datasets) as JSON-like values.

    Dates and decimals become strings, and numbers that are not finite null; what has no JSON form (bytes, images,
    audio) is left out. A missing number turns a column of integers into floats, which are turned back for parameters.
    """
    record = {str(key): value for key, cell in row.items() if (value := _plain(cell)) is not _NOTHING}
    for name in _INTEGERS:
        value = record.get(name)
        if isinstance(value, float) and value.is_integer():
            record[name] = int(value)
    # Each object has the keys of all of them, null where it lacks one.
    for name in _STRUCTURES - {"metadata"}:
        if name in record:
            record[name] = _without_nulls(record[name])
    return record


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [part for item in value if (part := _plain(item)) is not _NOTHING]
    if isinstance(value, Mapping):
        return {str(key): part for key, item in value.items() if (part := _plain(item)) is not _NOTHING}
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    return _NOTHING
