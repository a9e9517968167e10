"""From the name of an input to its reader."""

from __future__ import annotations

import re
from pathlib import Path

from detgen.errors import PromptsError
from detgen.prompts.dataset import DatasetPrompts
from detgen.prompts.formats import FORMATS, JsonLines
from detgen.prompts.source import Prompts

_NAME = re.compile(rf"(.+)\.({'|'.join(FORMATS)})(?:(?<!parquet)\.(gz|zst))?", re.IGNORECASE | re.DOTALL)


def open_prompts(given: str, column: str | None = None) -> Prompts:
    """The reader of a file, a folder or a dataset on the hub. Nothing is read yet.

    Args:
        given: the path, or "hf://...".
        column: the key or column that holds the prompts, if it has another name than usual.

    Raises:
        PromptsError: there is no such file, no reader for it, or it has no columns.
    """
    if given.startswith("hf://"):
        return DatasetPrompts(given, column)
    path = Path(given)
    try:
        if path.is_dir() or (not path.exists() and Path(given.partition("?")[0]).is_dir()):
            return DatasetPrompts(given, column)
        found = path.exists()
    except OSError as error:  # such as a prompt, too long for a file name
        raise PromptsError(f"cannot read {given}: {error.strerror}; name a file with prompts in it") from None
    if not found:
        raise PromptsError(f"there is no file {given}")
    if not path.is_file():  # a pipe would be empty when it is read again
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
    """The reader of what was piped to standard input and kept in `path`; `column` is as `open_prompts` takes it."""
    return JsonLines("standard input", "stdin", "stdin", "jsonl", path, column)
