"""What all inputs have in common: a name, a digest, and ordered records that become requests."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from detgen.engine.grammars import form_of
from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts.batch import custom_id, settings, short_digest
from detgen.prompts.json_text import RepeatedKeyError
from detgen.prompts.kinds import CONTENTS
from detgen.prompts.notices import Notices
from detgen.prompts.record import BadLine, parse_record, parse_score


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known about an input before the run.

    Attributes:
        sha256: digest of the file's bytes; of a dataset, of what identifies its content.
        prompts: number of records; None if counting would require a download.
    """

    sha256: str
    prompts: int | None


@dataclass(eq=False)
class Prompts(ABC):
    """An input. Nothing is read before it is inspected.

    Attributes:
        given: the user's name for it, for messages.
        name: short name for errors of single records; does not depend on the file's folder.
        stem: default name of the output folder.
        format: "jsonl", "json", "txt", "csv", "tsv", "parquet" or "dataset".
        path: the file or folder; None on the hub.
        column: the key or column with the prompts, if its name is not a usual one.
    """

    given: str
    name: str
    stem: str
    format: str
    path: Path | None
    column: str | None = None
    # Whether some ids are strings, so that the numbers of records without ids are strings, too; known after the input
    # is inspected.
    _string_ids: bool = field(default=False, init=False)
    # Digests of ids that several batch requests have; known after the input is inspected.
    _repeated: frozenset[int] = field(default=frozenset(), init=False)

    @abstractmethod
    def inspect(self) -> Inspection:
        """Count and identify the input.

        Raises:
            PromptsError: if it cannot be read, or holds no prompts.
        """

    @abstractmethod
    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield each record, not decoded, with its line or record number from 1.

        Raises:
            PromptsError: if the input, or the rest of it, cannot be read.
        """

    @abstractmethod
    def decode(self, item: Any) -> object:
        """Return the JSON-like value of one of `items`.

        Raises:
            RequestError: if it has none; the message gives the reason, without the place.
        """

    def check_unchanged(self) -> None:  # noqa: B027 (most inputs cannot change)
        """Raise if the input changed after it was inspected.

        Raises:
            PromptsError: if so.
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
        """Yield the first `limit` requests in input order.

        Args:
            defaults: parameters that a record does not set.
            limit: most records to read; None reads all.
            echo: whether outputs repeat their prompts.
            seed_per_line: derive the seed of a record that sets none from the default and its id (`line_seed`).
            say: receives notices about the input, lines of text.
            model: name of the model that runs, so that requests for another one are noticed.
            parse: makes a request of a record, like `parse_record`.

        Raises:
            PromptsError: if the input, or the rest of it, cannot be read.
        """
        notices = Notices(self.name, say, seed_per_line=seed_per_line, model=model) if say is not None else None
        first_lines: dict[str, int] = {}  # of ids that occur again
        for index, (line, item) in enumerate(islice(self.items(), limit)):
            record, wrong = self.decoded(item)
            if self.column is not None and isinstance(record, dict):
                record, wrong = self._with_column(record, self.column, wrong)
            number = str(line) if self._string_ids else line
            found = parse(record, index=index, line=line, number=number, defaults=defaults)
            if (first := self._first_with_id(record, line, first_lines)) != line:
                wrong = f"custom_id {found.id!r} is also that of line {first}; a batch may have each only once"
            if wrong is not None:
                found = BadLine(index, line, found.id, wrong, found.metadata)
            if notices is not None and parse is parse_record:
                notices.record(record, line)
            if isinstance(found, BadLine):
                yield replace(found, error=f"{self.name}:{line}: {found.error}")
                continue
            if found.form_key is None and (form := form_of(found.params)) is not None:  # from the defaults
                found = replace(found, form_key=PARAMETERS[form].flag if PARAMETERS[form].option else form)
            if seed_per_line and isinstance(record, dict) and settings(record).get("seed") is None:
                found = found.with_params(seed=line_seed(defaults.seed, found.id))
            if echo:
                found = replace(found, echo=True)
            if notices is not None:
                notices.request(found)
            yield found
        if notices is not None:
            notices.end()

    def decoded(self, item: Any) -> tuple[object, str | None]:
        """Return the value of one of `items`, and what is wrong with it; None and the reason if it has no value."""
        try:
            return self.decode(item), None
        except RepeatedKeyError as error:
            return error.value, str(error)
        except RequestError as error:
            return None, str(error)

    def _first_with_id(self, record: object, line: int, first_lines: dict[str, int]) -> int:
        """Return the first line with the id of a batch request: its own, unless the id is repeated."""
        if not self._repeated or (id := custom_id(record)) is None or short_digest(id) not in self._repeated:
            return line
        return first_lines.setdefault(id, line)

    @staticmethod
    def _with_column(record: dict[str, Any], column: str, wrong: str | None) -> tuple[object, str | None]:
        """Return a record with the chosen column as its prompt, chat or token ids, and what is wrong with it.

        None and the reason if there is no such column.
        """
        if column not in record:
            return None, f"there is no {column!r}, which --prompt-column names"
        content = record[column]
        kind = "prompt"
        if isinstance(content, list):
            kind = "prompt_token_ids" if content and isinstance(content[0], int) else "messages"
        return {kind: content, **{k: v for k, v in record.items() if k not in (column, *CONTENTS)}}, wrong


def read_scores(
    prompts: Prompts, limit: int | None = None, *, echo: bool = False, say: Callable[[str], None] | None = None
) -> Iterator[Request | BadLine]:
    """Yield the first `limit` requests to score, in input order; arguments and errors as for `Prompts.read`.

    A line of plain text is scored as a whole, and so is the content of a column that the user names if there are no
    completions beside it.
    """
    parse = partial(parse_score, texts=prompts.format == "txt" or prompts.column is not None)
    return prompts.read(SamplingParams(), limit, echo=echo, say=say, parse=parse)


def line_seed(seed: int, id: str | int) -> int:
    """Return the seed of a line that has none of its own (`--seed-per-line`): 0 <= seed < 2**63.

    It is the BLAKE2b digest of eight bytes of the JSON text `[seed,id]` (ASCII, without spaces), as a big-endian
    number, shifted right by one bit. It depends only on these two, so a line keeps its samples wherever it is.
    """
    return short_digest(json.dumps([seed, id], separators=(",", ":"))) >> 1
