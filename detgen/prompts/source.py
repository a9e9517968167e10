"""From the name of an input to its reader."""

from __future__ import annotations

from pathlib import Path

from detgen.errors import PromptsError
from detgen.prompts.dataset import DatasetPrompts
from detgen.prompts.files import ParquetPrompts, TextPrompts
from detgen.prompts.formats import FORMATS
from detgen.prompts.record_source import Prompts

_COMPRESSIONS = ("gz", "zst")
_SAME = {"ndjson": "jsonl"}


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
    stem, *suffixes = _split_name(path.name)
    format = _SAME.get(suffixes[0], suffixes[0]) if suffixes else ""
    if format == "parquet" and len(suffixes) == 1:
        return ParquetPrompts(given, path.name, stem, format, path, column)
    if format not in FORMATS:
        raise PromptsError(
            f"{given}: its name does not say what it holds; it must end in .jsonl, .ndjson, .json, .txt, .csv or .tsv"
            " (optionally followed by .gz or .zst) or in .parquet; to pipe JSON lines to stdin, pass -"
        )
    if format == "txt" and column is not None:
        raise PromptsError(f"{given}: a line of text has no columns; leave out --prompt-column")
    return TextPrompts(given, path.name, stem, format, path, column, *suffixes[1:])


def spooled_prompts(path: Path, column: str | None = None) -> Prompts:
    """The reader of what was piped to standard input and kept in `path`; `column` is as `open_prompts` takes it."""
    return TextPrompts("standard input", "stdin", "stdin", "jsonl", path, column)


def _split_name(name: str) -> list[str]:
    """Stem, format and compression (if any) in lower case."""
    parts = name.rsplit(".", 2)
    if len(parts) == 3 and parts[2].lower() in _COMPRESSIONS:
        return [parts[0], parts[1].lower(), parts[2].lower()]
    stem, _, suffix = name.rpartition(".")
    return [stem, suffix.lower()] if stem else [name]
