"""The journal: every finished sample, in the order of finishing, appended and fsynced.

One line a sample, with a checksum, since a crash of the machine may leave anything behind the last fsync. Memory holds
an offset a sample, not its text.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detgen.engine.request import Completion
from detgen.engine.stats import count_records
from detgen.errors import OutputError
from detgen.outputs.base import write_all, writing
from detgen.outputs.lines import acceptance_lines, dump, output_line, request_digest, shallow

# Steps may take less time than an fsync. Between two of them a killed process still loses nothing, a power cut at
# most this many seconds of work.
SYNC_SECONDS = 0.2

_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("index":(\d+),"sample":(\d+),.*\}\n)', re.DOTALL)
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished sample.

    Attributes:
        request: digest of what was asked.
        tokens: how many tokens it has.
        prompt_tokens: how many its prompt has.
        counts: what its records add up to, by drafter.
        output: its line of `outputs.jsonl`.
        acceptance: its lines of `acceptance.jsonl`.
    """

    index: int
    sample: int
    request: str
    tokens: int
    prompt_tokens: int
    counts: dict[str, dict[str, int]]
    output: str
    acceptance: str


def make_entry(completion: Completion) -> Entry:
    """The entry of a sample that ran."""
    return Entry(
        index=completion.request.index,
        sample=completion.sample,
        request=request_digest(completion.request),
        tokens=len(completion.token_ids),
        prompt_tokens=completion.prompt_tokens,
        counts={name: shallow(stats) for name, stats in count_records(completion.records).items()},
        output=output_line(completion),
        acceptance=acceptance_lines(completion),
    )


class Journal:
    """The journal of one run, opened for reading what a former process left and for appending.

    Attributes:
        kept: samples that a former process left.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal, and find what it holds.

        Raises:
            OutputError: it cannot be opened or written.
        """
        self._path = path
        self._first = array("q")  # where each prompt's sample 0 is; the other samples are rare
        self._others: dict[int, dict[int, int]] = {}
        self.kept = 0
        self._pending = bytearray()
        self._synced = time.monotonic()
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._reader = path.open("rb")
            self._end = self._recover()
            os.ftruncate(self._file, self._end)  # what a crash tore goes

    def offsets(self, index: int, samples: int) -> dict[int, int] | None:
        """Where the samples of a prompt are that a former process finished; None unless they are all there."""
        if index >= len(self._first) or self._first[index] == _NOWHERE:
            return None
        found = {0: self._first[index], **self._others.get(index, {})}
        return found if len(found) == samples else None

    def append(self, entry: Entry) -> int:
        """Take in an entry, to be written by `flush`; its offset is returned."""
        body = dump(shallow(entry))[1:].encode() + b"\n"
        offset = self._end + len(self._pending)
        self._pending += b'{"crc32":"%08x",' % zlib.crc32(body) + body
        return offset

    def flush(self, *, sync: bool = False) -> None:
        """Write what was appended; it survives the end of this process from now on.

        Raises:
            OutputError: it cannot be written.
        """
        with writing(self._path):
            write_all(self._file, self._pending)
            self._end += len(self._pending)
            self._pending.clear()
            if sync or time.monotonic() - self._synced >= SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()

    def read(self, offset: int) -> Entry:
        """An entry that was flushed.

        Raises:
            OutputError: the file was changed by something else.
        """
        self._reader.seek(offset)
        fields: dict[str, Any] | None = _parse(self._reader.readline())
        if fields is None:
            raise OutputError(f"{self._path} was changed while the run used it; run the same command again to resume")
        return Entry(**fields)

    def close(self) -> None:
        """Close the file; what was not committed is dropped."""
        self._reader.close()
        os.close(self._file)

    def _recover(self) -> int:
        """Note where the valid entries are; the end of the last one is returned."""
        end = 0
        for line in self._reader:
            head = _check(line)
            if head is None:
                break
            self._note(int(head[3]), int(head[4]), end)
            end += len(line)
        return end

    def _note(self, index: int, sample: int, offset: int) -> None:
        if sample:
            others = self._others.setdefault(index, {})
            self.kept += sample not in others
            others[sample] = offset
            return
        missing = index + 1 - len(self._first)
        if missing > 0:
            self._first.extend(array("q", [_NOWHERE]) * missing)
        self.kept += self._first[index] == _NOWHERE
        self._first[index] = offset


def read_entries(path: Path) -> Iterator[Entry]:
    """The valid entries of a journal that nobody need have open, in the order of finishing.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            fields = _parse(line)
            if fields is None:
                return
            yield Entry(**fields)


def _check(line: bytes) -> re.Match[bytes] | None:
    head = _HEAD.fullmatch(line)
    return head if head and int(head[1], 16) == zlib.crc32(head[2]) else None


def _parse(line: bytes) -> dict[str, Any] | None:
    head = _check(line)
    return json.loads(b"{" + head[2]) if head else None
