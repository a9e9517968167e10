"""The rows of a run's table: one per line of `outputs.jsonl`, with the prompt beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from detgen.engine.request import Request
from detgen.outputs import echoed
from detgen.outputs.lines import dump
from detgen.outputs.records import Line, columns
from detgen.prompts import BadLine

# The columns of all tables and the types of their values; a list is of values of one type. What a run does not have is
# null, so tables of all runs can be put together. Ids may be numbers or texts, hence they are texts.
COLUMNS = columns()
_CONTENTS = ("prompt", "messages", "prompt_token_ids")  # of a line with --echo


def row_of(line: Line, item: Request | BadLine | None) -> dict[str, Any]:
    """A row by its columns.

    Chats, token ids of a prompt and metadata are JSON; `logprobs` are those of the chosen tokens.

    Args:
        line: of `outputs.jsonl`.
        item: its prompt, where that is known.
    """
    row: dict[str, Any] = {name: line.get(name) for name in COLUMNS}
    row["id"], row["prompt"] = str(line["id"]), _prompt(line, item)
    if line.get("stop_reason") is not None:
        row["stop_reason"] = str(line["stop_reason"])
    row["metadata"] = dump(line["metadata"]) if "metadata" in line else None
    if "logprobs" in line:
        row["logprobs"] = [entry["logprob"] for entry in line["logprobs"]]
    return {name: _whole(value) if isinstance(value, str) else value for name, value in row.items()}


def _prompt(line: Line, item: Request | BadLine | None) -> str | None:
    given = {name: line[name] for name in _CONTENTS if name in line}
    if isinstance(item, Request):
        given = echoed(replace(item, echo=True))
    content = next(iter(given.values()), None)
    return content if content is None or isinstance(content, str) else dump(content)


def _whole(text: str) -> str:
    """A table has no place for half a surrogate pair, which JSON can spell."""
    return text.encode("utf-8", "backslashreplace").decode()
