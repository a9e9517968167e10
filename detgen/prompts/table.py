"""Rows of typed columns (Parquet, datasets) as JSON-like records."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from detgen.errors import PromptsError
from detgen.prompts.keys import INTEGERS, STRUCTURES
from detgen.prompts.kinds import CONTENTS

_NOTHING = object()


def check_columns(name: str, columns: Iterable[str], column: str | None, remedy: str) -> None:
    """Make sure that a table has a column of prompts.

    Raises:
        PromptsError: it has not the one that is named, or, if none is, none of the usual name.
    """
    columns = list(columns)
    if column is not None and column not in columns:
        raise PromptsError(f"{name}: no column {column}; choose from {', '.join(columns)}")
    if column is None and not any(each in columns for each in CONTENTS):
        raise PromptsError(f"{name}: no column prompt or messages among {', '.join(columns)}; {remedy}")


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON-like values.

    Dates and decimals become strings, and numbers that are not finite null; what has no JSON form (bytes, images,
    audio) is left out. A missing number turns a column of integers into floats, which are turned back for parameters.
    """
    record = {str(key): value for key, cell in row.items() if (value := _plain(cell)) is not _NOTHING}
    for name in INTEGERS:
        value = record.get(name)
        if isinstance(value, float) and value.is_integer():
            record[name] = int(value)
    # Each object has the keys of all of them, null where it lacks one.
    for name in STRUCTURES - {"metadata"}:
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


def import_package(package: str, module: str, given: str) -> Any:
    """A module that only some inputs need.

    Raises:
        PromptsError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PromptsError(f"{given}: reading it needs the package {package}: pip install {package}") from None
