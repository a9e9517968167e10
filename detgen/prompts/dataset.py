"""Prompts in a dataset, on the Hugging Face hub or in a local folder.

Rows of tables become records: each column holds the values of the key that it is named after.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

from detgen.errors import PromptsError, RequestError
from detgen.params import PARAMETERS
from detgen.prompts.files import import_package
from detgen.prompts.json_text import RepeatedKeyError, parse_json
from detgen.prompts.kinds import ALIASES, CONTENTS, KEYS
from detgen.prompts.source import Inspection, Prompts

_NOTHING = object()
# The type of each key's values; those in `_STRUCTURES` are or may be lists or objects.
_TYPES: dict[str, type] = {name: parameter.kind for name, parameter in PARAMETERS.items()}
_TYPES |= {alias: _TYPES[name] for alias, name in ALIASES.items()}
_TYPES |= {"id": str, "prompt": str, "continue_final_message": bool, "parallel_tool_calls": bool}
_INTEGERS = [name for name, its in _TYPES.items() if its is int]
_STRUCTURES = KEYS - {name for name, its in _TYPES.items() if its is not tuple} | {"guided_json"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_OPTIONS = ("split", "column", "config", "revision")


def check_columns(name: str, columns: Iterable[str], column: str | None, remedy: str) -> None:
    """Raise if a table has no column of prompts.

    Raises:
        PromptsError: if it lacks the named column or, if none is named, all of the usual ones.
    """
    columns = list(columns)
    if column is not None and column not in columns:
        raise PromptsError(f"{name}: no column {column}; choose from {', '.join(columns)}")
    if column is None and not any(each in columns for each in CONTENTS):
        raise PromptsError(f"{name}: no column prompt or messages among {', '.join(columns)}; {remedy}")


def read_cell(name: str, cell: str) -> object:
    """Convert a cell of text to a value of its column; one that does not parse stays a string, for the key's check.

    Raises:
        RequestError: if it is not UTF-8, or not the JSON that it must be.
    """
    try:
        cell.encode()
    except UnicodeEncodeError:  # from `surrogateescape`
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
                return cell  # metadata may be any text
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
    """Convert a row of typed columns (Parquet, datasets) to JSON-like values.

    Dates and decimals become strings, numbers that are not finite null; values without a JSON form (bytes, images,
    audio) are dropped. A missing number turns a column of integers into floats, which are turned back for parameters.
    """
    record = {str(key): value for key, cell in row.items() if (value := _plain(cell)) is not _NOTHING}
    for name in _INTEGERS:
        value = record.get(name)
        if isinstance(value, float) and value.is_integer():
            record[name] = int(value)
    # In a table, each object has the keys of all objects, null where it lacks one.
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


class DatasetPrompts(Prompts):
    """A dataset, streamed.

    Either `NAME` on the hub, or a folder that `save_to_disk` wrote or that holds data files. Options after a question
    mark: `split`, `column` (the column with the prompts or chats), `config` and `revision`.
    """

    def __init__(self, given: str, column: str | None = None) -> None:
        """Parse `given`; nothing is loaded yet.

        Raises:
            PromptsError: for an unknown option, a folder that does not exist, or two columns of prompts.
        """
        place, _, query = given.removeprefix("hf://").partition("?")
        self._options = dict(parse_qsl(query, keep_blank_values=True))
        for option in self._options:
            if option not in _OPTIONS:
                raise PromptsError(f"{given}: no option {option}; choose from {', '.join(_OPTIONS)}")
        local = not given.startswith("hf://") or place.startswith(("/", "."))
        if local and not Path(place).is_dir():
            raise PromptsError(f"{given}: there is no folder {place}")
        if not place.strip("/"):
            raise PromptsError(f"{given}: a dataset's name is missing, as in hf://NAME?split=test&column=prompt")
        self._place = place
        self._dataset: Any = None
        stem = (Path(place).resolve() if local else Path(place)).name
        named = self._options.get("column")
        if column is not None and named and column != named:
            raise PromptsError(f"{given} names the column {named}, --prompt-column {column}; leave one of them out")
        path = Path(place) if local else None
        super().__init__(
            given,
            name=stem,
            stem=stem,
            format="dataset",
            path=path,
            column=column if column is not None else named or None,
        )

    def inspect(self) -> Inspection:
        """Identify the dataset by its files' bytes, or by its commit on the hub.

        Raises:
            PromptsError: if it cannot be loaded, or holds no prompts.
        """
        if self.path is not None:
            origin: dict[str, str] = {"files": _digest(self.path)}
        else:
            origin = {"name": self._place, "commit": self._commit()}
        self._dataset = self._load(origin.get("commit"))
        first = next(self.items(), None)
        if first is None:
            raise PromptsError(f"no prompts in {self.given}")
        self._check_columns(list(first[1]))
        self._string_ids = self._has_string_ids(first[1])
        options = {name: self._options[name] for name in sorted(self._options) if name != "revision"}
        identity = json.dumps({**origin, **options}, sort_keys=True)
        return Inspection(hashlib.sha256(identity.encode()).hexdigest(), self._count())

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield each row with its number.

        Raises:
            PromptsError: if the dataset, or the rest of it, cannot be read.
        """
        if self._dataset is None:
            self._dataset = self._load(None)
        number = 0
        try:
            for number, row in enumerate(self._dataset, 1):
                yield number, row
        except Exception as error:  # datasets passes on any error of builders and network
            raise PromptsError(f"cannot read {self.given} after row {number}: {_reason(error)}") from error

    def decode(self, item: Any) -> object:
        """Return the row as JSON-like values."""
        record = read_row(item)
        if self.column is not None:
            record.setdefault(self.column, None)  # the cell has no JSON form
        return record

    def _load(self, revision: str | None) -> Any:
        datasets = import_package("datasets", self.given)
        datasets.disable_progress_bars()
        try:
            if self.path is not None and any((self.path / f).exists() for f in ("dataset_dict.json", "state.json")):
                dataset = datasets.load_from_disk(self._place)
            else:
                name = self._options.get("config")
                dataset = datasets.load_dataset(self._place, name=name, revision=revision, streaming=True)
        except Exception as error:
            remedy = "check the name and the network" if self.path is None else "it must hold data files"
            raise PromptsError(f"cannot load the dataset {self.given}: {_reason(error)}; {remedy}") from error
        return self._split(dataset)

    def _split(self, dataset: Any) -> Any:
        if not isinstance(dataset, dict):
            return dataset
        splits, wanted = ", ".join(dataset), self._options.get("split")
        if wanted is None and len(dataset) == 1:
            return next(iter(dataset.values()))
        if wanted is None:
            raise PromptsError(f"{self.given} has the splits {splits}: choose one, as in {self._with('split', 'test')}")
        if wanted not in dataset:
            raise PromptsError(f"{self.given}: no split {wanted}; choose from {splits}")
        return dataset[wanted]

    def _with(self, option: str, value: str) -> str:
        return f"{self.given}{'&' if '?' in self.given else '?'}{option}={value}"

    def _check_columns(self, columns: list[str]) -> None:
        remedy = f"choose one, as in {self._with('column', columns[0])}"
        check_columns(self.given, columns, self.column, remedy=remedy)

    def _has_string_ids(self, first: Any) -> bool:
        """Judge by the type of the column, or its first value: a dataset may be too large to be read twice."""
        type_ = (getattr(self._dataset, "features", None) or {}).get("id")
        return isinstance(first.get("id"), str) or getattr(type_, "dtype", None) in ("string", "large_string")

    def _commit(self) -> str:
        """Return the commit of the name; a resumed run loads it to read the same rows."""
        hub = import_package("huggingface_hub", self.given)
        try:
            info = hub.HfApi().dataset_info(self._place, revision=self._options.get("revision"), timeout=30)
        except Exception as error:
            raise PromptsError(
                f"cannot find {self.given} on the Hugging Face hub: {_reason(error)}; "
                "check the name and the network, or give a local folder"
            ) from error
        return str(info.sha)

    def _count(self) -> int | None:
        if hasattr(self._dataset, "__len__"):
            return len(self._dataset)
        info = self._dataset.info
        split = (info.splits or {}).get(str(self._dataset.split))
        return split.num_examples or None if split is not None else None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _digest(folder: Path) -> str:
    """Return a digest of the names and bytes of a folder's files, except hidden ones."""
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                with path.open("rb") as file:
                    digest.update(f"{name.as_posix()}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise PromptsError(f"cannot read {folder}: {error}") from None
    return digest.hexdigest()
