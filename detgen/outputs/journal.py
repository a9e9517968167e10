"""The journal: every finished sample, in the order of finishing, appended and fsynced.

An entry is a line of figures with a checksum, since a crash of the machine may leave anything after the last fsync,
followed by the sample's lines of `outputs.jsonl` and `acceptance.jsonl` as they will be copied. Memory holds one offset
per sample, not its text.
"""

from __future__ import annotations

import os
import time
from array import array

from detgen.errors import OutputError
from detgen.outputs.directory import copy, reader_of, write_all, writing
from detgen.outputs.entries import Entry, Gap, pack, place, read_packed, scan, unpack
from detgen.outputs.folder import JOURNAL, OutputFolder

# Least time between two fsyncs, since a round may be faster than one. Until the next one a killed process loses
# nothing, a power cut at most this many seconds of work.
SYNC_SECONDS = 0.2

_NOWHERE = -1


class Journal:
    """The journal of one run, open for reading what an earlier process left and for appending.

    Attributes:
        kept: samples that an earlier process left.
        gaps: what of it could not be read; samples that were there have to run again.
        file: its descriptor.
        end: bytes of it that count.

    Raises:
        OutputError: by every method that writes, if it cannot.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self.kept = 0
        self.gaps: list[Gap] = []
        self._folder = folder
        self._first = array("q")  # offset of each prompt's sample 0; other samples are rare
        self._others: dict[int, dict[int, int]] = {}
        self._pending = bytearray()
        self._synced = time.monotonic()
        with writing(folder.journal):
            self._open()
            self.end = self._recover()
            if not self.end:
                folder.directory.sync()  # it may be new

    def offsets(self, index: int) -> dict[int, int]:
        """Offsets of those of a prompt's samples that an earlier process finished."""
        first = self._first[index] if index < len(self._first) else _NOWHERE
        return {**({} if first == _NOWHERE else {0: first}), **self._others.get(index, {})}

    def append(self, entry: Entry) -> int:
        """Add an entry, to be written by `flush`; return its offset."""
        offset = self.end + len(self._pending)
        self._pending += pack(entry)
        return offset

    @property
    def waiting(self) -> int:
        """Bytes that were appended and not flushed."""
        return len(self._pending)

    def flush(self, *, sync: bool = False) -> bool:
        """Write what was appended; from now on it survives this process, and after an fsync a power cut.

        Args:
            sync: fsync even if the last one was less than `SYNC_SECONDS` ago.

        Returns:
            Whether there was an fsync.
        """
        with writing(self._folder.journal):
            write_all(self.file, self._pending)
            self.end += len(self._pending)
            self._pending.clear()
            if not sync and time.monotonic() - self._synced < SYNC_SECONDS:
                return False
            os.fsync(self.file)
            self._synced = time.monotonic()
        return True

    def read(self, offset: int) -> Entry:
        """Read a flushed entry.

        Raises:
            OutputError: something else changed the file.
        """
        self._reader.seek(offset)
        found = read_packed(self._reader)
        entry = unpack(found) if found is not None else None
        if entry is None:
            raise self._changed()
        return entry

    def keep(self) -> bool:
        """Write the file again if its name is gone or is another's; whether it was.

        Raises:
            OutputError: something else changed its content.
        """
        if os.fstat(self.file).st_size != self.end:
            raise self._changed()
        if self._folder.directory.holds(JOURNAL, self.file):
            return False
        with writing(self._folder.journal):
            self._rewrite([(0, self.end)])
        return True

    def close(self) -> None:
        """Close the file; entries that were not flushed are lost."""
        self._reader.close()
        os.close(self.file)

    def _changed(self) -> OutputError:
        return OutputError(
            f"{self._folder.journal} was changed while the run used it; run the same command again to resume"
        )

    def _open(self) -> None:
        self.file = self._folder.directory.open(JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if os.fstat(self.file).st_nlink > 1:
            os.close(self.file)
            raise OutputError(
                f"{self._folder.journal} has another name, too (a hard link), under which it would be changed;"
                " replace it by a copy, then run the same command again to resume"
            )
        self._reader = reader_of(self.file)

    def _recover(self) -> int:
        """Note the offsets of the whole entries, drop what is between them; return the end of the last one."""
        whole = self._scan()
        if not self.gaps:
            return whole
        if all(gap.start >= whole for gap in self.gaps):
            os.ftruncate(self.file, whole)
            self._reader = reader_of(self.file)  # its buffer must not hold what was dropped
            return whole
        ends = [0, *(gap.end for gap in self.gaps)]
        starts = [*(gap.start for gap in self.gaps), os.fstat(self.file).st_size]
        self._rewrite([(a, b) for a, b in zip(ends, starts, strict=True) if a < b])
        gaps, self.gaps = self.gaps, []
        self.kept = 0
        self._first = array("q")
        self._others.clear()
        whole = self._scan()
        self.gaps = gaps
        return whole

    def _scan(self) -> int:
        end = 0
        for found in scan(self._reader):
            if isinstance(found, Gap):
                self.gaps.append(found)
            else:
                self._note(*place(found[1]), found[0])
                end = self._reader.tell()
        return end

    def _rewrite(self, parts: list[tuple[int, int]]) -> None:
        """Replace the file by one that has these ranges of bytes of it."""
        with self._folder.directory.draft(JOURNAL) as file:
            for start, end in parts:
                copy(self.file, file, start, end)
        self.close()
        self._open()

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
