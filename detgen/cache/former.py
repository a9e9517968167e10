"""What an earlier run left in an output folder, kept for a run of other prompts into the same folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from detgen.cache.store import New, Store, entry_key
from detgen.cache.values import pack_lines
from detgen.errors import OutputError
from detgen.outputs import OutputFolder, read_entries
from detgen.outputs.base import copy, writing
from detgen.outputs.folder import ACCEPTANCE, FORMER, OUTPUTS
from detgen.outputs.manifest import REQUESTS

_BATCH = 1000  # completions to a transaction

_Sample = tuple[str | None, int, dict[str, Any], list[dict[str, Any]]]  # content, sample, output line, its records


def keep_former(folder: OutputFolder, former: dict[str, Any], profile: str) -> int | None:
    """Copy an earlier run's samples to a store in the folder, durably; the run's own files stay as they are.

    Args:
        folder: locked; if the run has finished, its files are as their digests say.
        former: the run's manifest.
        profile: `profile_digest` of its profile.

    Returns:
        How many samples the store has; None if it could not have all that gave a text: the run was without the
        guarantee, some are unverified, or it was made by an earlier detgen.

    Raises:
        OutputError: a file cannot be read or written.
        CacheError: the store cannot be written.
    """
    finished = former["status"] == "finished"
    if not former["probe"]["row_invariant"] or (finished and REQUESTS not in former["files"]):
        return None
    draft = f"{FORMER}.tmp"
    with writing(folder.path / draft):
        file = folder.directory.create(draft)
        try:
            if folder.directory.has(FORMER):  # of a run that has not finished, either
                with folder.directory.reader(FORMER) as earlier:
                    copy(earlier.fileno(), file, 0, os.fstat(earlier.fileno()).st_size)
        finally:
            os.close(file)
    model = former["profile"]["target"]["name"]
    samples = _finished(folder) if finished else _journal(folder)
    with _reading(folder.path), closing(Store(folder.path / draft, lone=True)) as store:
        while batch := list(islice(samples, _BATCH)):
            new = []
            for content, sample, line, records in batch:
                if content is None:
                    folder.directory.remove(draft)
                    return None
                value = pack_lines(line, records)
                new.append(New(entry_key(profile, content, sample), len(line["token_ids"]), value))
            for each in new:
                store.find(each.key)  # a damaged copy of it makes room
            store.add(profile, model, new)
        kept = store.count()
    with writing(folder.path / FORMER):
        file = folder.directory.open(draft)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        folder.directory.replace(draft, FORMER)
    return kept


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
    readers = [folder.directory.reader(name) for name in (OUTPUTS, ACCEPTANCE, REQUESTS)]
    with readers[0], readers[1], readers[2]:
        outputs, records, requests = (map(json.loads, reader) for reader in readers)
        logs = groupby(records, key=lambda record: (record["index"], record["sample"]))
        log, request = next(logs, None), next(requests, None)
        for line in outputs:
            if "error" in line:
                continue
            own: list[dict[str, Any]] = []
            if log is not None and log[0] == (line["index"], line["sample"]):
                own = list(log[1])
                log = next(logs, None)
            while request is not None and request["index"] < line["index"]:
                request = next(requests, None)
            content = request["request"] if request is not None and request["index"] == line["index"] else None
            yield content, line["sample"], line, own
