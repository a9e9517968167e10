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
from detgen.prompts.record import INTEGERS

_NOTHING = object()


def check_columns(name: str, columns: Iterable[str], remedy: str) -> None:
    """Make sure that a table has a column of prompts.

    Raises:
        PromptsError: it has neither a column `prompt` nor a column `messages`.
    """
    columns = list(columns)
    if "prompt" not in columns and "messages" not in columns:
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
    messages = record.get("messages")
    if isinstance(messages, list):  # each message has the keys of all of them, null where it lacks one
        record["messages"] = [
            {key: value for key, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return record


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
