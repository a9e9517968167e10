"""What earlier runs left in an output folder, kept for runs of other prompts into the same folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from detgen.cache.packed_values import pack_lines
from detgen.cache.store import New, Store, entry_key, profile_digest
from detgen.errors import CacheError, OutputError
from detgen.outputs import OutputFolder, read_entries
from detgen.outputs.directory import copy, writing
from detgen.outputs.folder import ACCEPTANCE, FORMER, OUTPUTS
from detgen.outputs.manifest import REQUESTS

_DRAFT = f"{FORMER}.tmp"
_BATCH = 1000  # completions to a transaction

_Sample = tuple[str | None, int, dict[str, Any], list[dict[str, Any]]]  # content, sample, output line, its records


def keep_former(folder: OutputFolder, former: dict[str, Any], profile: str) -> int | None:
    """Copy an earlier run's samples to a store in the folder, durably; the run's own files stay as they are.

    Args:
        folder: locked; if the run has finished, its files are as their digests say.
        former: the run's manifest.
        profile: `profile_digest` of its profile.

    Returns:
        How many samples the store has; None if it could not have all that gave a text: some are unverified, or the run
        was made by an earlier detgen.

    Raises:
        OutputError: a file cannot be read or written.
        CacheError: the store cannot be written.
    """
    finished = former["status"] == "finished"
    if finished and REQUESTS not in former["files"]:
        return None
    _draft(folder)
    model = former["profile"]["target"]["name"]
    samples = _finished(folder) if finished else _journal(folder)
    with _reading(folder.path), closing(Store(folder.path / _DRAFT, lone=True)) as store:
        while batch := list(islice(samples, _BATCH)):
            new = []
            for content, sample, line, records in batch:
                if content is None:
                    folder.directory.remove(_DRAFT)
                    return None
                value = pack_lines(line, records)
                new.append(New(entry_key(profile, content, sample), len(line["token_ids"]), value))
            for each in new:
                store.find(each.key)  # a damaged copy of it makes room
            store.add(profile, model, new)
        kept = store.count()
    _put_in_place(folder)
    return kept


def drop_written(folder: OutputFolder, manifest: dict[str, Any]) -> int:
    """Remove from the store what the finished run in the folder has itself; the store goes if nothing is left.

    Args:
        folder: locked.
        manifest: the run's.

    Returns:
        How many samples stay there: those that no prompt asks for any more.

    Raises:
        OutputError: a file cannot be read or written.
    """
    if not folder.directory.has(FORMER):
        return 0
    _draft(folder)
    profile = profile_digest(manifest["profile"])
    left = 0
    with suppress(CacheError), _reading(folder.path), closing(Store(folder.path / _DRAFT, lone=True)) as store:
        keys = (entry_key(profile, content, sample) for content, sample in _written(folder) if content is not None)
        while batch := list(islice(keys, _BATCH)):
            store.discard(batch)
        store.shrink()
        left = store.count()
    if left:
        _put_in_place(folder)
    else:
        with writing(folder.path / FORMER):
            folder.directory.remove(FORMER)
    return left


def _draft(folder: OutputFolder) -> None:
    """Begin the store as a copy of the one that is there, if one is."""
    with writing(folder.path / _DRAFT):
        file = folder.directory.create(_DRAFT)
        try:
            if folder.directory.has(FORMER):
                with folder.directory.reader(FORMER) as earlier:
                    copy(earlier.fileno(), file, 0, os.fstat(earlier.fileno()).st_size)
        finally:
            os.close(file)


def _put_in_place(folder: OutputFolder) -> None:
    with writing(folder.path / FORMER):
        file = folder.directory.open(_DRAFT)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        folder.directory.replace(_DRAFT, FORMER)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot read {folder}: {error.strerror or error}; choose another folder with -o") from error
    except (ValueError, TypeError, KeyError) as error:
        raise OutputError(f"{folder} has a line that is none of a run; choose another folder with -o") from error


def _journal(folder: OutputFolder) -> Iterator[_Sample]:
    """The samples of an unfinished run that gave a text."""
    if not folder.directory.has(folder.journal.name):
        return
    for entry in read_entries(folder.journal):
        if not entry.error:
            records = [json.loads(raw) for raw in entry.acceptance.splitlines()]
            yield entry.content, entry.sample, json.loads(entry.output), records


def _finished(folder: OutputFolder) -> Iterator[_Sample]:
    """The samples of a finished run that gave a text."""
    with folder.directory.reader(ACCEPTANCE) as reader:
        logs = groupby(map(json.loads, reader), key=lambda record: (record["index"], record["sample"]))
        log = next(logs, None)
        for content, line in _lines(folder):
            own: list[dict[str, Any]] = []
            if log is not None and log[0] == (line["index"], line["sample"]):
                own = list(log[1])
                log = next(logs, None)
            yield content, line["sample"], line, own


def _lines(folder: OutputFolder) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The output lines of a finished run that are texts, with the digests of their requests."""
    with folder.directory.reader(OUTPUTS) as outputs, folder.directory.reader(REQUESTS) as reader:
        requests = map(json.loads, reader)
        request = next(requests, None)
        for line in map(json.loads, outputs):
            if "error" in line:
                continue
            while request is not None and request["index"] < line["index"]:
                request = next(requests, None)
            yield (request["request"] if request is not None and request["index"] == line["index"] else None), line


def _written(folder: OutputFolder) -> Iterator[tuple[str | None, int]]:
    """The samples of a finished run that gave a text."""
    return ((content, line["sample"]) for content, line in _lines(folder))
