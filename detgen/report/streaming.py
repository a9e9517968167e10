"""The files of a run, streamed: whole lines in blocks, and on the way their digests and whatever no run writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from detgen.errors import OutputError
from detgen.outputs import open_plain

_BLOCK = 4 << 20  # bytes
_SHOWN = 20  # faults that are kept
_LARGEST = 2**62  # of numbers of prompts and samples

Fields = dict[str, Any]


@dataclass(slots=True)
class Faults:
    """What of a folder is not as the run wrote it.

    Attributes:
        first: the first ones, in words, with file and line.
        count: all of them.
    """

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, what: str) -> None:
        """Note one."""
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(what)

    def take(self, others: Faults, folder: str) -> None:
        """Add those of another folder."""
        self.first += [f"{folder}: {what}" for what in others.first]
        self.count += others.count


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole lines.

    Attributes:
        line: number of the first one, from 1.
        start: its first byte in the file.
        raw: the bytes, with line ends; only the file's last line may have none.
    """

    line: int
    start: int
    raw: bytes


def open_file(path: Path) -> BinaryIO:
    """A file of a run, open for reading.

    Raises:
        OutputError: it cannot be read.
    """
    try:
        return open(open_plain(path), "rb")
    except FileNotFoundError:
        raise OutputError(f"{path} is missing; restore the folder, or run the prompts again") from None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from None


def blocks(path: Path, manifest: Fields, faults: Faults) -> Iterator[Block]:
    """A file in blocks; its size and digest are compared with the manifest's at the end.

    Args:
        path: the file.
        manifest: of its run. The last line of one that has not finished may be torn, and is left out.
        faults: takes what is wrong.

    Raises:
        OutputError: it cannot be read.
    """
    known = manifest.get("files", {}).get(path.name)
    sha256, size = hashlib.sha256(), 0
    line, start, rest = 1, 0, b""
    with open_file(path) as file:
        while data := file.read(_BLOCK):
            sha256.update(data)
            size += len(data)
            data = rest + data
            end = data.rfind(b"\n") + 1
            raw, rest = data[:end], data[end:]
            if raw:
                yield Block(line, start, raw)
            line, start = line + raw.count(b"\n"), start + end
    if rest and known is not None:
        yield Block(line, start, rest)
    if known is not None and (size, sha256.hexdigest()) != (known["bytes"], known["sha256"]):
        faults.add(f"{path.name}: its size or SHA-256 is not what the manifest says; it was changed after the run")


def records(block: Block, name: str, faults: Faults) -> list[Fields]:
    """The objects of a block that say whose they are; lines that do not are faults.

    Args:
        block: the lines.
        name: of the file, for messages.
        faults: takes the other lines.
    """
    lines = block.raw.removesuffix(b"\n").split(b"\n")
    try:  # all at once is twice as fast as one by one
        found = json.loads((b"[" + b",".join(lines) + b"]").decode())
        if len(found) == len(lines) and all(map(_keyed, found)):
            return list(found)
    except (ValueError, RecursionError):
        pass
    kept = []
    for number, raw in enumerate(lines, start=block.line):
        if (fields := parse(raw)) is None:
            faults.add(f"{name}:{number}: is not a line of a run")
        else:
            kept.append(fields)
    return kept


def parse(raw: bytes) -> Fields | None:
    """The object of a line that says whose it is; None if there is none."""
    try:
        fields = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return fields if _keyed(fields) else None


def _keyed(fields: Any) -> bool:
    """Whether it says whose it is, in numbers that fit an int64."""
    if type(fields) is not dict:
        return False
    index, sample = fields.get("index"), fields.get("sample")
    return type(index) is type(sample) is int and 0 <= index <= _LARGEST and 0 <= sample <= _LARGEST
