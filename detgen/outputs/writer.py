"""Writes samples in input order, whatever the order in which they finish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.errors import OutputError
from detgen.outputs.directory import FolderLostError, writing
from detgen.outputs.folder import ACCEPTANCE, OUTPUTS, OutputFolder
from detgen.outputs.folder_store import FolderStore
from detgen.outputs.lines import acceptance_lines, bad_line, dump, echoed, output_line
from detgen.outputs.log_file import LogFile, log_file
from detgen.outputs.samples import Sample, Samples
from detgen.outputs.totals import Totals
from detgen.prompts import BadLine

# How far the input may be read past the first unwritten prompt. An unwritten prompt takes a few hundred bytes, since
# its samples are in the store; memory holds only what their lines repeat of the request, and the lines of errors.
AHEAD_PROMPTS = 1 << 15
AHEAD_BYTES = 1 << 26

# A commit waits this many times as long as the last one took: commits take less than 2 % of a run, more on a slow disk.
SPARING = 80
_LONGEST = 2.0  # seconds: the longest wait, however slow the disk
LOOK_SECONDS = 0.2  # between checks of the folder


@dataclass(slots=True)
class _Slot:
    """A prompt whose lines are not written yet.

    Attributes:
        request: the part of the request that its lines need; None if it cannot run.
        missing: number of its samples that are not finished.
        entries: store entries of committed samples, by sample.
        made: samples that are still in memory, by sample.
        error: its line if it cannot run.
        failed: whether a sample is known to have ended with an error.
        size: bytes that it holds apart from these.
    """

    request: Request | None
    missing: int
    entries: dict[int, int] = field(default_factory=dict)
    made: dict[int, Sample] = field(default_factory=dict)
    error: bytes | None = None
    failed: bool = False
    size: int = 0


class Writer:
    """Takes prompts in input order and samples in any order; writes lines in input order.

    A sample's lines are written once it is committed to the store. When a run resumes, both files are written again
    from the store.

    Attributes:
        totals: totals of what is written.
        fresh: totals of the samples that this process generated, written or not.
        done: number of finished prompts, written or not.
        errors: number of those that cannot run, or with a sample that is known to have ended with an error.
        resumed: number of samples that the folder had.
        reused: number of samples taken from a shared store.

    Raises:
        OutputError: by every method that writes a file, on failure.
    """

    def __init__(
        self,
        folder: OutputFolder,
        samples: Samples,
        *,
        pieces: Pieces,
        log: str | None = ACCEPTANCE,
    ) -> None:
        """Open the files, the acceptance log only if it has a name; `pieces` are those of the target's tokenizer."""
        assert isinstance(samples.own, FolderStore)
        self.totals, self.fresh = Totals(), Totals()
        self.done = self.errors = self.resumed = self.reused = 0
        self._folder, self._pieces = folder, pieces
        self._samples, self._store = samples, samples.own
        self._store.begin()
        self._slots: dict[int, _Slot] = {}
        self._next = 0
        self._size = 0
        self._adding: list[tuple[_Slot, Sample]] = []
        self._committed = self._looked = time.monotonic()
        self._cost = 0.0
        self._outputs = LogFile(folder, OUTPUTS)
        self._acceptance = None if log is None else log_file(folder, log)

    @property
    def _logs(self) -> list[LogFile]:
        return [log for log in (self._outputs, self._acceptance) if log is not None]

    @property
    def waiting(self) -> int:
        """Number of prompts that are not written yet."""
        return len(self._slots)

    @property
    def full(self) -> bool:
        """Whether no more prompts should be taken until some are written."""
        return len(self._slots) >= AHEAD_PROMPTS or self._size >= AHEAD_BYTES

    def recall(self, request: Request) -> Sequence[int]:
        """Add the next request; return its samples that no store has."""
        slot = self._slots[request.index] = _Slot(_short(request), request.samples)
        self._grow(slot, _size(request))
        found = self._samples.take_own(request, request.wanted)
        for sample, (entry, made) in found.items():
            slot.entries[sample] = entry
            self._finish(slot, made)
        self.resumed += len(found)
        missing = [sample for sample in request.wanted if sample not in found]
        taken = self._samples.take_shared(request, missing)
        for made in taken.values():
            self._add(slot, made, shared=True)
        self.reused += len(taken)
        if not slot.missing:
            self._advance()
        if not taken:
            slot.made.clear()
        elif self._samples.many:
            self.flush()
        return [sample for sample in missing if sample not in taken]

    def refuse(self, bad: BadLine) -> None:
        """Add the next input line, which cannot run."""
        slot = self._slots[bad.index] = _Slot(None, 0)
        self._set_error(slot, bad_line(bad))
        self._advance()

    def finish(self, sample: Sample) -> None:
        """Add a sample, or the error of a request that could not run; `flush` writes it."""
        slot = self._slots[sample.request.index]
        if sample.refused:
            self._set_error(slot, output_line(sample, self._pieces))
        elif slot.error is None:
            self._add(slot, sample)
            self.fresh.add(sample)

    def flush(self, *, now: bool = False) -> None:
        """Commit what was added if it is time, and write to the two files whatever is next in order.

        Args:
            now: commit in any case.

        Raises:
            FolderLostError: if the folder no longer belongs to this run; see `rescuing`.
        """
        began = time.monotonic()
        due = began - self._committed >= min(SPARING * self._cost, _LONGEST) or self._samples.many
        if now or due or began - self._looked >= LOOK_SECONDS:
            self._looked = began
            self._folder.check()
            self._folder.keep_manifest()
            self._store.keep()
        if now or due:
            self._commit()
            self._committed = time.monotonic()
            self._cost = self._committed - began
            self._advance()
            for slot, _ in self._adding:
                slot.made.clear()
            self._adding.clear()
            for log in self._logs:
                log.flush()

    def finish_all(self) -> dict[str, dict[str, Any]]:
        """Make everything durable.

        Returns:
            "sha256" and "bytes" of each file, by name.
        """
        self.flush(now=True)
        files = {log.name: log.sync() for log in self._logs}
        with writing(self._folder.path):
            self._folder.directory.sync()
        return files

    def damage(self) -> str | None:
        """Return what others did to the two files during the run; None if they hold what was written."""
        return next(filter(None, (log.damage() for log in self._logs)), None)

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Keep finished samples if the folder is lost inside the block.

        Raises:
            OutputError: if it was; the message says where the finished samples are.
        """
        try:
            yield
        except FolderLostError as lost:
            self._commit()
            place = self._store.rescue()
            if place is None:
                raise OutputError(f"{lost}; what was finished could not be kept") from None
            option = "" if place == self._folder.path else f" with -o {place}"
            again = f"run the same command again{option} to resume"
            raise OutputError(f"{lost}; what was finished is kept in {place}: {again}") from None

    def close(self) -> None:
        """Close the files, after committing what was added unless something went wrong with the store."""
        with suppress(OutputError):
            if self._store.whole:
                self._commit()
        for log in self._logs:
            log.close()

    def _add(self, slot: _Slot, sample: Sample, *, shared: bool = False) -> None:
        self._samples.add(sample, shared=shared)
        self._adding.append((slot, sample))
        self._finish(slot, sample)

    def _finish(self, slot: _Slot, sample: Sample) -> None:
        slot.made[sample.sample] = sample
        slot.missing -= 1
        self.done += slot.missing == 0
        self._fail(slot, sample.error is not None)

    def _commit(self) -> None:
        entries = self._samples.commit()
        uncommitted = [(slot, made) for slot, made in self._adding if made.sample not in slot.entries]
        for (slot, made), entry in zip(uncommitted, entries, strict=True):
            slot.entries[made.sample] = entry

    def _advance(self) -> None:
        """Write the prompts that are next in order, as far as they are committed."""
        while (slot := self._slots.get(self._next)) and not slot.missing:
            if slot.error is None and len(slot.entries) < (slot.request.samples if slot.request else 0):
                return
            self._write(slot)
            del self._slots[self._next]
            self._next += 1
            self._size -= slot.size

    def _set_error(self, slot: _Slot, line: str) -> None:
        slot.error = line.encode()
        self._grow(slot, len(slot.error))
        slot.missing = 0
        self.done += 1
        self._fail(slot, True)

    def _grow(self, slot: _Slot, size: int) -> None:
        slot.size += size
        self._size += size

    def _fail(self, slot: _Slot, failed: bool) -> None:
        self.errors += failed and not slot.failed
        slot.failed = slot.failed or failed

    def _write(self, slot: _Slot) -> None:
        self.totals.prompts += 1
        self.totals.errors += slot.failed
        if slot.error is not None:
            self._outputs.write(slot.error)
            return
        assert slot.request is not None
        scores = []
        for number, entry in sorted(slot.entries.items()):
            made = slot.made.get(number) or self._samples.read(entry, slot.request, number)
            self._outputs.write(output_line(made, self._pieces).encode())
            if self._acceptance is not None and isinstance(made, Completion) and made.error is None:
                self._acceptance.write(acceptance_lines(made).encode())
            self.totals.add(made)
            if isinstance(made, Score):
                scores.append(made)
        if isinstance(slot.request, ScoreRequest):
            self.totals.answers.add(slot.request, scores)


def _short(request: Request) -> Request:
    """Return the request with only what its lines need."""
    if request.echo:
        return request
    return replace(request, prompt=None, messages=None, token_ids=None, tools=None, chat_template_kwargs=None)


def _size(request: Request) -> int:
    """Return the approximate number of bytes that its lines repeat of it."""
    repeated = [*request.metadata.items(), *echoed(request).items()]
    return len(dump(repeated)) if repeated else 0
