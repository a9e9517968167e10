"""Stream the files of a run: whole lines in blocks, with a check of digests and of lines that no run writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from detgen.errors import OutputError
from detgen.outputs import open_plain
from detgen.outputs.log_file import DamagedError, TornError, contents
from detgen.outputs.records import is_line, parse_line

_SHOWN = 20  # faults that are kept

Fields = dict[str, Any]


@dataclass(slots=True)
class Faults:
    """What in a folder is not as the run wrote it.

    Attributes:
        first: the first faults in words, with file and line.
        count: number of faults.
    """

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, what: str) -> None:
        """Record a fault."""
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(what)

    def take(self, others: Faults, folder: str) -> None:
        """Add the faults of another folder."""
        self.first += [f"{folder}: {what}" for what in others.first]
        self.count += others.count


@dataclass(frozen=True, slots=True)
class Block:
    """A block of consecutive whole lines.

    Attributes:
        line: number of the first line, from 1.
        start: offset of the block in the file.
        raw: its bytes with line ends; only the file's last line may lack one.
    """

    line: int
    start: int
    raw: bytes


def open_file(path: Path) -> BinaryIO:
    """Open a file of a run for reading.

    Raises:
        OutputError: if it cannot be read.
    """
    try:
        return open(open_plain(path), "rb")
    except FileNotFoundError:
        raise OutputError(f"{path} is missing; restore the folder, or run the prompts again") from None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from None


def blocks(path: Path, manifest: Fields, faults: Faults) -> Iterator[Block]:
    """Read a file in blocks; at the end, compare its size and digest with the manifest's.

    Args:
        path: the file.
        manifest: manifest of its run. If that has not finished, the last line may be torn, and is left out.
        faults: receives what is wrong.

    Raises:
        OutputError: if it cannot be read.
    """
    known = manifest.get("files", {}).get(path.name)
    sha256, size = hashlib.sha256(), 0
    line, start, rest = 1, 0, b""

    def see(data: bytes) -> None:
        nonlocal size
        sha256.update(data)
        size += len(data)

    with open_file(path) as file:
        parts = contents(file, path.name, see)
        try:
            for part in parts:
                data = rest + part
                end = data.rfind(b"\n") + 1
                raw, rest = data[:end], data[end:]
                if raw:
                    yield Block(line, start, raw)
                line, start = line + raw.count(b"\n"), start + end
        except DamagedError as error:
            if known is not None or not isinstance(error, TornError):
                faults.add(f"{path.name}: {error}")
    if rest and known is not None:
        yield Block(line, start, rest)
    if known is not None and (size, sha256.hexdigest()) != (known["bytes"], known["sha256"]):
        faults.add(f"{path.name}: its size or SHA-256 is not what the manifest says; it was changed after the run")


def records(block: Block, name: str, faults: Faults) -> list[tuple[int, Fields]]:
    """Return the output lines of a block with their offsets in the file; lines that no run writes are faults.

    Args:
        block: the lines.
        name: name of the file in messages.
        faults: receives invalid lines.
    """
    raws = block.raw.removesuffix(b"\n").split(b"\n")
    try:  # parsing all at once is twice as fast
        found = json.loads((b"[" + b",".join(raws) + b"]").decode())
        if len(found) != len(raws) or not all(map(is_line, found)):
            found = map(parse_line, raws)
    except (ValueError, RecursionError):
        found = map(parse_line, raws)
    kept, at = [], block.start
    for number, (raw, line) in enumerate(zip(raws, found, strict=True), start=block.line):
        if line is None:
            faults.add(f"{name}:{number}: is not a line of a run")
        else:
            kept.append((at, line))
        at += len(raw) + 1
    return kept
