"""Writes samples in input order, whatever order they finish in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.engine.stats import DraftCounts
from detgen.errors import OutputError
from detgen.outputs.directory import digest, write_all, writing
from detgen.outputs.entries import Entry, Gap, make_entry
from detgen.outputs.folder import ACCEPTANCE, OUTPUTS, OutputFolder
from detgen.outputs.holding import FolderLostError
from detgen.outputs.journal import Journal
from detgen.outputs.lines import bad_line, content_digest, output_line, request_digest, request_line
from detgen.outputs.manifest import REQUESTS
from detgen.prompts import BadLine

# How far the input may be read past the first unwritten prompt. An unwritten prompt takes a few hundred bytes, since
# its samples are in the journal; only the lines of errors are kept in memory.
AHEAD_PROMPTS = 1 << 15
AHEAD_BYTES = 1 << 26

_BLOCK = 1 << 20


@dataclass(slots=True)
class Totals:
    """Totals over what a run wrote.

    Attributes:
        prompts: all of them.
        samples: those that gave a text.
        errors: prompts that could not run, or of which a sample ended with an error.
        tokens: of the samples.
        prompt_tokens: of each prompt whose first sample gave a text.
        drafters: counts by drafter.
    """

    prompts: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafters: DraftCounts = field(default_factory=DraftCounts)

    def add(self, entry: Entry) -> None:
        """Count a sample; a prompt's errors are counted by whoever knows all of its samples."""
        self.samples += not entry.error
        self.tokens += entry.tokens
        self.prompt_tokens += entry.prompt_tokens if entry.sample == 0 else 0
        self.drafters.add(entry.drafts)


@dataclass(slots=True)
class _Slot:
    """A prompt that is not written yet.

    Attributes:
        missing: how many of its samples are not finished.
        offsets: offsets in the journal, by sample.
        digest: of the request, if samples of it are an earlier process's.
        line: its line of `requests.jsonl`, if it is a request.
        error: its line if it cannot run.
        failed: whether any of its samples is known to have ended with an error.
    """

    missing: int
    offsets: dict[int, int] = field(default_factory=dict)
    digest: str | None = None
    line: bytes = b""
    error: bytes | None = None
    failed: bool = False


class Writer:
    """Takes prompts in input order and samples in any order; writes lines in input order.

    When a run resumes, both files are written again from the journal.

    Attributes:
        totals: totals over what is written.
        fresh: totals over the samples that this process generated, written or not.
        done: prompts that are finished, written or not.
        errors: those of them that cannot run, or of which a sample is known to have ended with an error.
        resumed: samples taken from the journal.
        reused: samples taken from a completion cache.

    Raises:
        OutputError: by every method that writes a file, if it cannot.
    """

    def __init__(
        self, folder: OutputFolder, say: Callable[[str], None] = lambda text: None, *, acceptance: bool = True
    ) -> None:
        """Open the files, what scores do not have only if there is to be an acceptance log; `say` is told of them."""
        self.totals = Totals()
        self.fresh = Totals()
        self.done = 0
        self.errors = 0
        self.resumed = 0
        self.reused = 0
        self._folder = folder
        self._slots: dict[int, _Slot] = {}
        self._next = 0
        self._error_bytes = 0
        self._say = say
        self._journal = Journal(folder)
        self._outputs = _Log(folder, OUTPUTS)
        self._acceptance = _Log(folder, ACCEPTANCE) if acceptance else None
        self._requests = _Log(folder, REQUESTS) if acceptance else None

    @property
    def _logs(self) -> list[_Log]:
        return [log for log in (self._outputs, self._acceptance, self._requests) if log is not None]

    @property
    def kept(self) -> int:
        """Samples that the journal held when it was opened."""
        return self._journal.kept

    @property
    def gaps(self) -> list[Gap]:
        """What of the journal could not be read when it was opened."""
        return self._journal.gaps

    @property
    def waiting(self) -> int:
        """Prompts that are not written yet."""
        return len(self._slots)

    @property
    def full(self) -> bool:
        """Whether to take no more prompts until some are written."""
        return len(self._slots) >= AHEAD_PROMPTS or self._error_bytes >= AHEAD_BYTES

    def recall(self, request: Request) -> Sequence[int]:
        """Add the next request; those of its samples that the journal does not have.

        Raises:
            OutputError: the journal does not belong to these requests.
        """
        samples = range(request.samples)
        offsets = {sample: at for sample, at in self._journal.offsets(request.index).items() if sample in samples}
        slot = self._slots[request.index] = _Slot(missing=request.samples - len(offsets), offsets=offsets)
        if self._requests is not None:
            slot.line = request_line(request.index, content_digest(request))
        if not offsets:
            return samples
        slot.digest = request_digest(request)
        self.resumed += len(offsets)
        if slot.missing:
            return [sample for sample in samples if sample not in offsets]
        self.done += 1
        self._advance()
        return ()

    def reuse(self, completion: Completion) -> None:
        """Add a sample that a completion cache has."""
        self._add(completion)
        self.reused += 1
        if self._journal.waiting >= _BLOCK:
            self.flush()

    def refuse(self, bad: BadLine) -> None:
        """Add the next input line, which cannot run."""
        slot = self._slots[bad.index] = _Slot(missing=0)
        self._set_error(slot, bad_line(bad))
        self._advance()

    def finish(self, completion: Completion | Score) -> None:
        """Add a sample, or the error of a request that could not run; `flush` writes it."""
        slot = self._slots[completion.request.index]
        if completion.refused:
            self._set_error(slot, output_line(completion))
        elif slot.error is None:
            self.fresh.add(self._add(completion))

    def flush(self) -> None:
        """Write what was added: all of it to the journal, and to the two files whatever is next in order.

        Raises:
            FolderLostError: the folder is no longer this run's; see `rescuing`.
        """
        synced = self._journal.flush()
        self._advance()
        for log in self._logs:
            log.flush()
        if synced:
            self._keep()

    def finish_all(self) -> dict[str, dict[str, Any]]:
        """Make everything durable.

        Returns:
            "sha256" and "bytes" of the two files, by name.
        """
        self.flush()
        self._journal.flush(sync=True)
        self._keep()
        files = {log.name: log.sync() for log in self._logs}
        with writing(self._folder.path):
            self._folder.directory.sync()
        return files

    def damage(self) -> str | None:
        """What something else did to the two files while they were written; None if they hold what was written."""
        found = (log.damage() for log in self._logs)
        return next((what for what in found if what is not None), None)

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Keep what is finished if the folder is lost inside the block.

        Raises:
            OutputError: it was; the message says where the finished samples are.
        """
        try:
            yield
        except FolderLostError as lost:
            self._journal.flush(sync=True)
            former = self._folder.path
            place = self._folder.rescue(self._journal.file, self._journal.end)
            if place is None:
                kept = "what was finished could not be kept"
            elif place == former:
                kept = f"what was finished is kept in {place}: run the same command again to resume"
            else:
                kept = f"what was finished is kept in {place}: run the same command again with -o {place} to resume"
            raise OutputError(f"{lost}; {kept}") from None

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        for log in self._logs:
            log.close()

    def _keep(self) -> None:
        """See that the folder is this run's still, and that it has what a resume would need."""
        self._folder.check()
        self._folder.keep_manifest()
        if self._journal.keep():
            self._say(f"{self._folder.journal} was deleted while the run used it; it is written again")

    def _add(self, completion: Completion | Score) -> Entry:
        entry = make_entry(completion)
        slot = self._slots[entry.index]
        slot.offsets[entry.sample] = self._journal.append(entry)
        slot.missing -= 1
        self.done += slot.missing == 0
        self._fail(slot, entry.error)
        return entry

    def _advance(self) -> None:
        """Copy whatever is next in order, as far as the journal is flushed."""
        while (slot := self._slots.get(self._next)) and not slot.missing:
            if slot.error is None and max(slot.offsets.values()) >= self._journal.end:
                return
            self._write(slot)
            del self._slots[self._next]
            self._next += 1

    def _set_error(self, slot: _Slot, line: str) -> None:
        slot.error = line.encode()
        slot.missing = 0
        self._error_bytes += len(slot.error)
        self.done += 1
        self._fail(slot, True)

    def _fail(self, slot: _Slot, failed: bool) -> None:
        self.errors += failed and not slot.failed
        slot.failed = slot.failed or failed

    def _write(self, slot: _Slot) -> None:
        self.totals.prompts += 1
        if self._requests is not None:
            self._requests.write(slot.line)
        if slot.error is not None:
            self.totals.errors += 1
            self._error_bytes -= len(slot.error)
            self._outputs.write(slot.error)
            return
        for _, offset in sorted(slot.offsets.items()):
            entry = self._journal.read(offset)
            if slot.digest not in (None, entry.request):
                raise OutputError(
                    f"{self._folder.journal} has another prompt {self._next + 1} than the input: it was written for"
                    " other prompts or by another detgen; start over with --overwrite, or choose another folder"
                    " with -o"
                )
            self._outputs.write(entry.output)
            if self._acceptance is not None:
                self._acceptance.write(entry.acceptance)
            self.totals.add(entry)
            self._fail(slot, entry.error)
        self.totals.errors += slot.failed


class _Log:
    """One of the two files, written from the start, with its digest."""

    def __init__(self, folder: OutputFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        self._block = bytearray()
        self._sha256 = hashlib.sha256()
        self._size = 0
        with writing(self._path):
            self._file = folder.directory.create(name)

    @property
    def _path(self) -> Path:
        return self._folder.path / self.name

    def write(self, data: bytes) -> None:
        self._block += data
        if len(self._block) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        with writing(self._path):
            write_all(self._file, self._block)
        self._sha256.update(self._block)
        self._size += len(self._block)
        self._block.clear()

    def sync(self) -> dict[str, Any]:
        with writing(self._path):
            os.fsync(self._file)
        return {"sha256": self._sha256.hexdigest(), "bytes": self._size}

    def damage(self) -> str | None:
        """What something else did to the file; None if it is as it was written."""
        if not self._folder.directory.has(self.name):
            return f"{self._path} was deleted"
        if not self._folder.directory.holds(self.name, self._file):
            return f"{self._path} was replaced by another"
        if os.fstat(self._file).st_size != self._size or digest(self._file) != self._sha256.hexdigest():
            return f"{self._path} was changed"
        return None

    def close(self) -> None:
        os.close(self._file)
