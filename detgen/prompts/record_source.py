"""What all inputs have in common: a name, a digest, and records in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import SamplingParams
from detgen.prompts.batch import custom_id, id_digest, settings
from detgen.prompts.json_text import RepeatedKeyError
from detgen.prompts.kinds import CONTENTS
from detgen.prompts.notices import Notices
from detgen.prompts.record import BadLine, parse_record
from detgen.prompts.seeds import line_seed


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of an input before the run.

    Attributes:
        sha256: digest of the file's bytes; of a dataset, of whatever identifies its content.
        prompts: how many records it has; None where counting would mean downloading.
    """

    sha256: str
    prompts: int | None


@dataclass(eq=False)
class Prompts(ABC):
    """An input. Nothing is read before it is inspected.

    Attributes:
        given: what the user called it; used in messages.
        name: short name used in the errors of single records; does not depend on where the file is.
        stem: what the output folder is named after.
        format: "jsonl", "json", "txt", "csv", "tsv", "parquet" or "dataset".
        path: the file or folder; None if it is on the hub.
        column: the key or column that holds the prompts, if it has another name than usual.
    """

    given: str
    name: str
    stem: str
    format: str
    path: Path | None
    column: str | None = None
    # Whether records have ids that are strings, so that the numbers of those without ids are strings, too: known once
    # the input is inspected.
    _string_ids: bool = field(default=False, init=False)
    # Digests of the ids that more than one batch request has: known likewise.
    _repeated: frozenset[int] = field(default=frozenset(), init=False)

    @abstractmethod
    def inspect(self) -> Inspection:
        """Count and identify the input.

        Raises:
            PromptsError: it cannot be read, or holds no prompts.
        """

    @abstractmethod
    def items(self) -> Iterator[tuple[int, Any]]:
        """Each record, not decoded, with its line or record number from 1.

        Raises:
            PromptsError: the input, or the rest of it, cannot be read.
        """

    @abstractmethod
    def decode(self, item: Any) -> object:
        """The JSON-like value of one of `items`.

        Raises:
            RequestError: it has none; the message gives the reason, without the place.
        """

    def check_unchanged(self) -> None:  # noqa: B027 (most inputs cannot change)
        """Make sure that what was read is what was inspected.

        Raises:
            PromptsError: the input changed in between.
        """

    def read(
        self,
        defaults: SamplingParams,
        limit: int | None = None,
        *,
        echo: bool = False,
        seed_per_line: bool = False,
        say: Callable[[str], None] | None = None,
        model: str | None = None,
        parse: Callable[..., Request | BadLine] = parse_record,
    ) -> Iterator[Request | BadLine]:
        """The first `limit` requests, in input order.

        Args:
            defaults: the parameters that a record does not set.
            limit: most records to read; None reads all.
            echo: whether outputs repeat their prompts.
            seed_per_line: derive the seed of a record that sets none from the default and its id (`line_seed`).
            say: is told, a line each, what a person should hear of the input.
            model: the name of the model that runs, so that a person hears of requests for another one.
            parse: what makes a request of a record, as `parse_record` does.

        Raises:
            PromptsError: the input, or the rest of it, cannot be read.
        """
        notices = Notices(self.name, say, seed_per_line=seed_per_line, model=model) if say is not None else None
        first_lines: dict[str, int] = {}  # of the ids that come again
        for index, (line, item) in enumerate(islice(self.items(), limit)):
            number = str(line) if self._string_ids else line
            repeated: RepeatedKeyError | None = None
            try:
                try:
                    record = self.decode(item)
                except RepeatedKeyError as error:
                    record, repeated = error.value, error
                record = self._with_column(record)
            except RequestError as error:
                yield BadLine(index=index, line=line, id=number, error=f"{self.name}:{line}: {error}")
                continue
            found = parse(record, index=index, line=line, name=self.name, defaults=defaults, number=number)
            if repeated is not None:
                found = BadLine(index, line, found.id, f"{self.name}:{line}: {repeated}", found.metadata)
            if (first := self._first_with_id(record, line, first_lines)) != line:
                reason = f"custom_id {found.id!r} is that of line {first}, too; a batch has each once"
                found = BadLine(index, line, found.id, f"{self.name}:{line}: {reason}", found.metadata)
            if notices is not None and parse is parse_record:
                notices.record(record, line)
            if isinstance(found, Request):
                if seed_per_line and isinstance(record, dict) and settings(record).get("seed") is None:
                    found = found.with_params(seed=line_seed(defaults.seed, found.id))
                if echo:
                    found = replace(found, echo=True)
                if notices is not None:
                    notices.request(found)
            yield found
        if notices is not None:
            notices.end()

    def _first_with_id(self, record: object, line: int, first_lines: dict[str, int]) -> int:
        """The first line with the id of a batch request: its own, unless the id comes again."""
        if not self._repeated or (id := custom_id(record)) is None or id_digest(id) not in self._repeated:
            return line
        return first_lines.setdefault(id, line)

    def _with_column(self, record: object) -> object:
        """A record with the content of the chosen column as its prompt, chat or token ids."""
        column = self.column
        if column is None or not isinstance(record, dict):
            return record
        if column not in record:
            raise RequestError(f"there is no {column!r}, which --prompt-column names")
        content = record[column]
        kind = "prompt"
        if isinstance(content, list):
            kind = "prompt_token_ids" if content and isinstance(content[0], int) else "messages"
        return {kind: content, **{key: value for key, value in record.items() if key not in (column, *CONTENTS)}}
