"""The files of a run, read beside each other: lines by prompt and sample, in order, however damaged they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from detgen.outputs import Entry, read_entries
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
            for number, raw in enumerate(file, start=1):
                where = f"{self._name}:{number}"
                if self._stopped and not raw.endswith(b"\n"):
                    self.torn = raw
                    return
                fields = parse(raw)
                if fields is None:
                    self._result.add(where, "is not a line of a run", "line")
                else:
                    yield Line(where, raw, fields, (fields["index"], fields["sample"]))


def parse(raw: bytes) -> dict[str, Any] | None:
    """The object of a line that says whose it is; None if there is none."""
    try:
        fields = json.loads(raw.decode())  # of bytes it would guess the encoding
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not type(fields.get("index")) is type(fields.get("sample")) is int:
        return None
    return fields


@dataclass(slots=True)
class _Kept:
    """What memory holds of an entry: its digest, and the entry while no other file has its lines."""

    digest: bytes
    entry: Entry | None


class StoppedJournal:
    """The journal of a stopped run.

    Args:
        folder: the output folder.
        result: takes entries that are none.
    """

    def __init__(self, folder: Path, result: AuditResult) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._result = result
        path = folder / "journal.jsonl"
        if not path.is_file():
            return
        written = min(_last_key(folder / name) for name in ("outputs.jsonl", "acceptance.jsonl"))
        number = 0
        try:
            for entry in read_entries(path):
                number += 1
                key = (entry.index, entry.sample)
                self._kept[key] = _Kept(_digest(entry), entry if key >= written else None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            result.add("journal.jsonl", f"entry {number + 1} is none of a run, though its checksum is right", "line")

    def entry(self, key: Key) -> Entry | None:
        """The entry of a sample whose lines may be missing from the other files."""
        kept = self._kept.get(key)
        return kept.entry if kept else None

    def has(self, key: Key) -> bool:
        """Whether there is an entry of a sample."""
        return key in self._kept

    def check(self, derived: Entry) -> None:
        """Compare an entry with what it must be."""
        key = (derived.index, derived.sample)
        kept = self._kept.pop(key, None)
        if kept is None or kept.digest == _digest(derived):
            return
        what = "its lines or figures are not those of the other files, or not what its tokens give"
        if kept.entry is not None:
            wrong = [name for name in Entry.__slots__ if getattr(kept.entry, name) != getattr(derived, name)]
            what = f"{', '.join(wrong)}: not what its tokens give"
        self._result.add("journal.jsonl", f"the entry of {in_words(key)}: {what}", "line")

    def forget(self, key: Key) -> None:
        """Leave out a sample whose lines cannot be derived."""
        self._kept.pop(key, None)

    def rest(self) -> None:
        """Entries of samples that the prompts do not have are findings."""
        for key in self._kept:
            self._result.add("journal.jsonl", f"has an entry of {in_words(key)}, which is no sample of the run", "line")


def _digest(entry: Entry) -> bytes:
    figures = (*(getattr(entry, name) for name in Entry.__slots__ if name != "drafts"), sorted(entry.drafts.items()))
    return hashlib.blake2b(repr(figures).encode(), digest_size=16).digest()


def _last_key(path: Path) -> Key:
    """Whose the last whole line of a file is; before all others if there is no telling."""
    if path.is_file():
        with path.open("rb") as file:
            fields = parse(_last_line(file))
        if fields:
            return fields["index"], fields["sample"]
    return -1, -1


def _last_line(file: BinaryIO, block: int = 1 << 16) -> bytes:
    """The last line that has an end; empty if there is none."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while end and tail.count(b"\n") < 2:
        start = max(end - block, 0)
        file.seek(start)
        tail = file.read(end - start) + tail
        end = start
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole[whole.rfind(b"\n", 0, -1) + 1 :]
