"""The rows of a run's table: one per line of `outputs.jsonl`, with the prompt beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from detgen.engine.request import Request
from detgen.errors import OutputError
from detgen.outputs import echoed
from detgen.outputs.finished import Line
from detgen.outputs.lines import dump
from detgen.prompts import BadLine

# The columns of all tables and the types of their values; a list is of values of one type. What a run does not have is
# null, so tables of all runs can be put together. Ids may be numbers or texts, hence they are texts.
COLUMNS: dict[str, str | list[str]] = {
    "id": "string",
    "index": "int64",
    "sample": "int64",
    "prompt": "string",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "int64",
    "error": "string",
    "metadata": "string",
    "token_ids": ["int64"],
    "logprobs": ["float64"],
}
_CONTENTS = ("prompt", "messages", "prompt_token_ids")  # of a line with --echo


def row_of(line: Line, item: Request | BadLine | None) -> dict[str, Any]:
    """A row by its columns.

    Chats, token ids of a prompt and metadata are JSON; `logprobs` are those of the chosen tokens.

    Args:
        line: of `outputs.jsonl`.
        item: its prompt, where that is known.

    Raises:
        OutputError: the line is not one of a run.
    """
    row: dict[str, Any] = {name: line.get(name) for name in COLUMNS}
    row["prompt"] = _prompt(line, item)
    row["metadata"] = dump(line["metadata"]) if "metadata" in line else None
    try:
        row["id"] = str(line["id"])
        if "logprobs" in line:
            row["logprobs"] = [entry["logprob"] for entry in line["logprobs"]]
        for name, type_ in COLUMNS.items():
            row[name] = _checked(row[name], type_)
    except (KeyError, TypeError) as error:
        raise OutputError(f"outputs.jsonl: the line of prompt {line['index'] + 1} is not one of a run") from error
    return row


def _prompt(line: Line, item: Request | BadLine | None) -> str | None:
    given = {name: line[name] for name in _CONTENTS if name in line}
    if isinstance(item, Request):
        given = echoed(replace(item, echo=True))
    content = next(iter(given.values()), None)
    return content if content is None or isinstance(content, str) else dump(content)


def _checked(value: Any, type_: str | list[str]) -> Any:
    """A value that is null or of its type.

    Raises:
        TypeError: it is neither.
    """
    if value is None:
        return None
    if isinstance(type_, list):
        if not isinstance(value, list):
            raise TypeError
        return [_checked(part, type_[0]) for part in value]
    if type_ == "string" and isinstance(value, str):
        # A table has no place for half a surrogate pair, which JSON can spell.
        return value.encode("utf-8", "backslashreplace").decode()
    if type_ == "float64" and type(value) in (int, float):
        return float(value)
    if type_ == "int64" and type(value) is int and abs(value) < 2**63:
        return value
    raise TypeError
