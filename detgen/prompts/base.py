"""What all inputs have in common: a name, a digest, and records in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from detgen.engine.request import Request, SamplingParams
from detgen.errors import RequestError
from detgen.prompts.record import BadLine, parse_record


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
        format: "jsonl", "json", "txt", "csv", "parquet" or "dataset".
        path: the file or folder; None if it is on the hub.
    """

    given: str
    name: str
    stem: str
    format: str
    path: Path | None

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

    def read(self, defaults: SamplingParams, limit: int | None = None) -> Iterator[Request | BadLine]:
        """The first `limit` requests, in input order; `defaults` are the parameters that a record does not set.

        Raises:
            PromptsError: the input, or the rest of it, cannot be read.
        """
        for index, (line, item) in enumerate(islice(self.items(), limit)):
            try:
                record = self.decode(item)
            except RequestError as error:
                yield BadLine(index=index, line=line, id=line, error=f"{self.name}:{line}: {error}")
            else:
                yield parse_record(record, index=index, line=line, name=self.name, defaults=defaults)
