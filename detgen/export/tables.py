"""A run as a table: a row per line of `outputs.jsonl`, with its prompt.

The datasets library writes it: CSV, Parquet, or a dataset on the disk.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from detgen.engine.request import Request
from detgen.errors import OutputError, PromptsError
from detgen.outputs import echoed
from detgen.outputs.lines import dump
from detgen.outputs.records import Line, columns
from detgen.prompts import BadLine

# The columns of all tables and the types of their values; a list has values of one type. Missing values are null, so
# that tables of all runs can be concatenated. Ids are texts, since they may be numbers or texts.
COLUMNS = columns()
# The columns of scores.
SCORE_COLUMNS: dict[str, str | list[str]] = {
    **{"id": "string", "index": "int64", "sample": "int64", "prompt": "string", "completion": "string"},
    **{"logprob": "float64", "is_greedy": "bool", "prompt_tokens": "int64", "completion_tokens": "int64"},
    **{"error": "string", "metadata": "string", "token_ids": ["int64"], "logprobs": ["float64"]},
}
_CONTENTS = ("prompt", "messages", "prompt_token_ids")  # of a line with --echo


def row_of(
    line: Line, item: Request | BadLine | None, columns: Mapping[str, str | list[str]] = COLUMNS
) -> dict[str, Any]:
    """Return a line as a row by its columns.

    Chats, token ids of a prompt, calls of tools and metadata are JSON; `logprobs` are those of the chosen tokens.

    Args:
        line: a line of `outputs.jsonl`.
        item: its prompt, if known.
        columns: `COLUMNS`, or `SCORE_COLUMNS` if the line is a score.
    """
    row: dict[str, Any] = {name: line.get(name) for name in columns}
    row["id"], row["prompt"] = str(line["id"]), _prompt(line, item)
    if line.get("stop_reason") is not None:
        row["stop_reason"] = str(line["stop_reason"])
    for name in ("metadata", "tool_calls"):
        if name in line:
            row[name] = dump(line[name])
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
    """Escape lone surrogates, which JSON can spell but tables cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_table(rows: Iterable[dict[str, Any]], form: str, path: Path, digest: str) -> int:
    """Write a table, which readers find complete or not at all. Memory holds a thousand rows.

    Args:
        rows: rows from `row_of`.
        form: "csv", "parquet" or "hf", a folder for `datasets.load_from_disk`.
        path: path of the table.
        digest: digest of the rows, which identifies the dataset.

    Returns:
        The number of rows.

    Raises:
        OutputError, PromptsError: from the rows.
        OSError: if it cannot be written.
    """
    import datasets

    datasets.disable_progress_bars()
    flat = form == "csv"  # CSV has no lists
    features = features_of(COLUMNS, flat=flat)

    def generate() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {name: dump(cell) if flat and isinstance(cell, list) else cell for name, cell in row.items()}

    with placed(path) as made:
        try:
            table = datasets.Dataset.from_generator(
                generate, features=features, cache_dir=str(made.parent / "rows"), fingerprint=digest
            )
        except datasets.exceptions.DatasetGenerationError as error:
            if isinstance(error.__cause__, OutputError | PromptsError | OSError):
                raise error.__cause__ from None
            raise
        if form == "csv":
            # Otherwise a carriage return in an unquoted text would end its row for many readers.
            table.to_csv(made, quoting=csv.QUOTE_NONNUMERIC)
        elif form == "parquet":
            table.to_parquet(made)
        else:
            table.save_to_disk(made)
        return len(table)


def features_of(columns: Mapping[str, str | list[str]], *, flat: bool = False) -> Any:
    """Return the types of columns for datasets; lists become texts if `flat`."""
    from datasets import Features, List, Value

    def feature(type_: str | list[str]) -> Any:
        if isinstance(type_, list):
            return Value("string") if flat else List(Value(type_[0]))
        return Value(type_)

    return Features({name: feature(type_) for name, type_ in columns.items()})


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Yield a temporary path, whose file or folder is moved to `path` when the block ends.

    Raises:
        OSError: if nothing can be written beside `path`.
    """
    with TemporaryDirectory(prefix=".detgen-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        os.replace(made, path)
