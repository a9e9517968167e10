"""Prompts in a dataset: on the Hugging Face hub, or in a local folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from detgen.errors import PromptsError
from detgen.prompts.columns import check_columns, read_row
from detgen.prompts.files import import_package
from detgen.prompts.source import Inspection, Prompts

_OPTIONS = ("split", "column", "config", "revision")


class DatasetPrompts(Prompts):
    """A dataset, streamed.

    Either `NAME` on the hub, or a folder that `save_to_disk` wrote or that holds data files. After a question mark:
    `split`, `column` (the one that holds the prompts or chats), `config` and `revision`.
    """

    def __init__(self, given: str, column: str | None = None) -> None:
        """Take `given` apart; nothing is loaded yet.

        Raises:
            PromptsError: an unknown option, a folder that does not exist, or two columns of prompts.
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
        """Identify the dataset: by its files' bytes, or by its commit on the hub.

        Raises:
            PromptsError: it cannot be loaded, or holds no prompts.
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
        """Each row, with its number.

        Raises:
            PromptsError: the dataset, or the rest of it, cannot be read.
        """
        if self._dataset is None:
            self._dataset = self._load(None)
        number = 0
        try:
            for number, row in enumerate(self._dataset, 1):
                yield number, row
        except Exception as error:  # datasets raises whatever the builder and the network do
            raise PromptsError(f"cannot read {self.given} after row {number}: {_reason(error)}") from error

    def decode(self, item: Any) -> object:
        """The row as JSON-like values."""
        record = read_row(item)
        if self.column is not None:
            record.setdefault(self.column, None)  # a cell without a JSON form
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
        """By the type of the column, or its first value: a dataset may be too large to be read twice."""
        type_ = (getattr(self._dataset, "features", None) or {}).get("id")
        return isinstance(first.get("id"), str) or getattr(type_, "dtype", None) in ("string", "large_string")

    def _commit(self) -> str:
        """The commit that the name stands for now; loading it makes a resumed run read the same rows."""
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
    """Digest of the names and bytes of a folder's files, except hidden ones."""
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
