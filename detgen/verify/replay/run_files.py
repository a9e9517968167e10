"""The files of a run, read beside each other: lines by prompt and sample, in order, however damaged they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from detgen.outputs.log_file import DamagedError, TornError, contents
from detgen.verify.replay.result import AuditResult

Key = tuple[int, int]  # index of the prompt, number of the sample


class Line(NamedTuple):
    """One line of a file.

    Attributes:
        where: file and line number.
        raw: its bytes, with their end.
        fields: what they spell.
        key: whose line it says it is.
    """

    where: str
    raw: bytes
    fields: dict[str, Any]
    key: Key


def in_words(key: Key) -> str:
    """A key in words."""
    return f"prompt {key[0]}, sample {key[1]}"


class Lines:
    """The lines of one file; memory holds one of them.

    Args:
        path: the file.
        stopped: the run has not finished; its last line may be torn.
        result: takes the lines that are none.

    Attributes:
        torn: the last line of a stopped run, if it has no end.
    """

    def __init__(self, path: Path, *, stopped: bool, result: AuditResult) -> None:
        self.torn = b""
        self._name, self._stopped, self._result = path.name, stopped, result
        self._lines: Iterator[Line] = self._read(path) if path.is_file() else iter(())
        self._held: Line | None = None

    def peek(self) -> Line | None:
        """The next line; None at the end."""
        if self._held is None:
            self._held = next(self._lines, None)
        return self._held

    def take(self, key: Key) -> Line | None:
        """The next line if it is one of `key`; whatever should have come before it is a finding."""
        while (line := self.peek()) is not None and line.key <= key:
            self._held = None
            if line.key == key:
                return line
            self._result.add(line.where, f"is {in_words(line.key)}, but {in_words(key)} comes here", "line")
        return None

    def take_all(self, key: Key) -> list[Line]:
        """The next lines as long as they are those of `key`."""
        found = []
        while (line := self.take(key)) is not None:
            found.append(line)
        return found

    def rest(self) -> None:
        """Whatever is left is a finding."""
        while (line := self.peek()) is not None:
            self._held = None
            self._result.add(line.where, "comes after the last prompt's output", "line")

    def _read(self, path: Path) -> Iterator[Line]:
        with path.open("rb") as file:
            for number, raw in enumerate(self._raw(file), start=1):
                where = f"{self._name}:{number}"
                if self._stopped and not raw.endswith(b"\n"):
                    self.torn = raw
                    return
                fields = parse(raw)
                if fields is None:
                    self._result.add(where, "is not a line of a run", "line")
                else:
                    yield Line(where, raw, fields, (fields["index"], fields["sample"]))

    def _raw(self, file: BinaryIO) -> Iterator[bytes]:
        """The lines, with their ends; a compressed file that is not whole is a finding, unless its run was stopped."""
        rest = b""
        try:
            for block in contents(file, self._name):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line + b"\n" for line in lines)
        except DamagedError as error:
            if not (self._stopped and isinstance(error, TornError)):
                self._result.add(self._name, str(error), "file")
        if rest:
            yield rest


def parse(raw: bytes) -> dict[str, Any] | None:
    """The object of a line that says whose it is; None if there is none."""
    try:
        fields = json.loads(raw.decode())  # of bytes it would guess the encoding
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not type(fields.get("index")) is type(fields.get("sample")) is int:
        return None
    return fields
