"""The journal: every finished sample, in the order of finishing, appended and fsynced.

An entry is a line of figures with a checksum, since a crash of the machine may leave anything after the last fsync,
followed by the sample's lines of `outputs.jsonl` and `acceptance.jsonl` as they will be copied. Memory holds one offset
per sample, not its text.
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
from typing import BinaryIO

from detgen.engine.request import Completion
from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.errors import OutputError
from detgen.outputs.base import write_all, writing
from detgen.outputs.lines import acceptance_lines, dump, output_line, request_digest, shallow

# Least time between two fsyncs, since a round may be faster than one. Until the next one a killed process loses
# nothing, a power cut at most this many seconds of work.
SYNC_SECONDS = 0.2

_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("index":(\d+),"sample":(\d+),"bytes":\[(\d+),(\d+)\],.*\}\n)')
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished sample.

    Attributes:
        index: place of the prompt in the input, from 0.
        sample: which of the prompt's samples, from 0.
        request: digest of the request.
        tokens: tokens of the completion.
        prompt_tokens: tokens of the prompt.
        drafts: the counts of its records, by drafter.
        output: its line of `outputs.jsonl`.
        acceptance: its lines of `acceptance.jsonl`.
    """

    index: int
    sample: int
    request: str
    tokens: int
    prompt_tokens: int
    drafts: DraftCounts
    output: bytes
    acceptance: bytes


def make_entry(completion: Completion) -> Entry:
    """The entry of a sample that ran."""
    return Entry(
        index=completion.request.index,
        sample=completion.sample,
        request=request_digest(completion.request),
        tokens=len(completion.token_ids),
        prompt_tokens=completion.prompt_tokens,
        drafts=completion.drafts,
        output=output_line(completion).encode(),
        acceptance=acceptance_lines(completion).encode(),
    )


class Journal:
    """The journal of one run, open for reading what an earlier process left and for appending.

    Attributes:
        kept: samples that an earlier process left.

    Raises:
        OutputError: by every method that writes, if it cannot.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = array("q")  # offset of each prompt's sample 0; other samples are rare
        self._others: dict[int, dict[int, int]] = {}
        self.kept = 0
        self._pending = bytearray()
        self._synced = time.monotonic()
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._end = self._recover()
            os.ftruncate(self._file, self._end)  # drop what a crash left incomplete
            self._reader = path.open("rb")  # only now: its buffer must not hold what was dropped

    def offsets(self, index: int, samples: int) -> dict[int, int] | None:
        """Offsets of a prompt's samples, if an earlier process finished all of them; else None."""
        if index >= len(self._first) or self._first[index] == _NOWHERE:
            return None
        found = {0: self._first[index], **self._others.get(index, {})}
        return found if len(found) == samples else None

    def append(self, entry: Entry) -> int:
        """Add an entry, to be written by `flush`; return its offset."""
        offset = self._end + len(self._pending)
        self._pending += _pack(entry)
        return offset

    def flush(self, *, sync: bool = False) -> None:
        """Write what was appended; from now on it survives this process, and after an fsync a power cut.

        Args:
            sync: fsync even if the last one was less than `SYNC_SECONDS` ago.
        """
        with writing(self._path):
            write_all(self._file, self._pending)
            self._end += len(self._pending)
            self._pending.clear()
            if sync or time.monotonic() - self._synced >= SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()

    def read(self, offset: int) -> Entry:
        """Read a flushed entry.

        Raises:
            OutputError: something else changed the file.
        """
        self._reader.seek(offset)
        found = _read(self._reader)
        if found is None:
            raise OutputError(f"{self._path} was changed while the run used it; run the same command again to resume")
        return _entry(found)

    def close(self) -> None:
        """Close the file; entries that were not flushed are lost."""
        self._reader.close()
        os.close(self._file)

    def _recover(self) -> int:
        """Note the offsets of the valid entries; return the end of the last one."""
        end = 0
        with self._path.open("rb") as file:
            while found := _read(file):
                self._note(int(found[0][3]), int(found[0][4]), end)
                end = file.tell()
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
    """The valid entries of a journal, in the order of finishing; it need not be open.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        while found := _read(file):
            yield _entry(found)


_Packed = tuple[re.Match[bytes], bytes, bytes]  # line of figures, lines of the two files


def _entry(packed: _Packed) -> Entry:
    head, output, acceptance = packed
    fields = json.loads(b"{" + head[2])
    drafts = DraftCounts({name: DrafterStats(**counts) for name, counts in fields["drafts"].items()})
    known = {name: fields[name] for name in ("index", "sample", "request", "tokens", "prompt_tokens")}
    return Entry(**known, drafts=drafts, output=output, acceptance=acceptance)


def _pack(entry: Entry) -> bytes:
    figures = {
        "index": entry.index,
        "sample": entry.sample,
        "bytes": (len(entry.output), len(entry.acceptance)),
        "request": entry.request,
        "tokens": entry.tokens,
        "prompt_tokens": entry.prompt_tokens,
        "drafts": {name: shallow(stats) for name, stats in entry.drafts.items()},
    }
    body = b"".join((dump(figures)[1:].encode(), b"\n", entry.output, entry.acceptance))
    return b'{"crc32":"%08x",' % zlib.crc32(body) + body


def _read(file: BinaryIO) -> _Packed | None:
    """Read the entry at the file's position; None if it is incomplete or invalid."""
    head = _HEAD.fullmatch(file.readline())
    if head is None:
        return None
    output, acceptance = int(head[5]), int(head[6])
    if output + acceptance > os.fstat(file.fileno()).st_size - file.tell():
        return None
    lines = file.read(output + acceptance)
    if int(head[1], 16) != zlib.crc32(lines, zlib.crc32(head[2])):
        return None
    return head, lines[:output], lines[output:]
