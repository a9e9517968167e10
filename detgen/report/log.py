"""The acceptance log as columns: blocks of whole samples, for arithmetic on all of their entries at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from detgen.drafters.registry import DRAFTERS
from detgen.engine.request import Status
from detgen.report.reading import Faults, Fields, blocks, records

STATUSES: tuple[Status, ...] = get_args(Status)
NAMES = (*(name for name in DRAFTERS if name != "auto"), "fast")  # of drafters, as a log has them
NONE = -1  # in place of a token: none was committed, or none drafted

_COLUMNS = ("index", "sample", "position", "round", "token", "drafted", "drafter", "status", "margin", "logprob")
_values = itemgetter(*_COLUMNS)
_drafter = {name: i for i, name in enumerate(NAMES)}.get
_status = {status: i for i, status in enumerate(STATUSES)}.get
_LARGEST = 2**62
_WRONG = (KeyError, TypeError, ValueError, OverflowError)  # what values of other kinds raise


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of whole samples, in the order of the log.

    Attributes:
        records: as the log has them.
        position, round, token, drafted: int64 [entries]; NONE for no token.
        drafter, status: int64 [entries], places in NAMES and STATUSES.
        margin: float64 [entries]; nan for none.
        samples: int64 [samples], the first entry of each sample.
        rounds: int64 [rounds], the first entry of each round.
        depth: int64 [entries], place in its round.
    """

    records: list[Fields]
    position: np.ndarray
    round: np.ndarray
    token: np.ndarray
    drafted: np.ndarray
    drafter: np.ndarray
    status: np.ndarray
    margin: np.ndarray
    samples: np.ndarray
    rounds: np.ndarray
    depth: np.ndarray

    def sample(self, number: int) -> list[Fields]:
        """The entries of one of the samples, as the log has them."""
        first = int(self.samples[number])
        last = int(self.samples[number + 1]) if number + 1 < len(self.samples) else len(self.records)
        return self.records[first:last]

    def key(self, number: int) -> tuple[int, int]:
        """Index of the prompt and number of the sample of one of the samples."""
        return key_of(self.records[int(self.samples[number])])


def key_of(record: Fields) -> tuple[int, int]:
    """Index of the prompt and number of the sample of an entry or an output line."""
    return record["index"], record["sample"]


def read_log(folder: Path, manifest: Fields, faults: Faults) -> Iterator[Entries]:
    """The acceptance log of a run, some thousand entries at a time.

    Args:
        folder: the output folder.
        manifest: of the run.
        faults: takes what no run writes.

    Raises:
        OutputError: it cannot be read.
    """
    held: list[Fields] = []  # of the sample whose entries may go on in the next block
    latest = (-1, -1)
    path = folder / "acceptance.jsonl"
    for block in blocks(path, manifest, faults):
        found = held + records(block, path.name, faults)
        if not found:
            continue
        last = key_of(found[-1])
        end = len(found)
        while end and key_of(found[end - 1]) == last:
            end -= 1
        held = found[end:]
        if end:
            latest = _check_order(found[:end], latest, path.name, faults)
            if (entries := _sound(found[:end], path.name, faults)) is not None:
                yield entries
    if held:
        _check_order(held, latest, path.name, faults)
        if (entries := _sound(held, path.name, faults)) is not None:
            yield entries


def _check_order(found: list[Fields], latest: tuple[int, int], name: str, faults: Faults) -> tuple[int, int]:
    """See that samples come in the order of the input; the last one's key."""
    first = key_of(found[0])
    if first <= latest:
        faults.add(f"{name}: prompt {first[0]}, sample {first[1]} comes after prompt {latest[0]}, sample {latest[1]}")
    return max(latest, key_of(found[-1]))


def _sound(found: list[Fields], name: str, faults: Faults) -> Entries | None:
    """The entries whose values are of the right kinds; the others are faults. None if there are none."""
    try:
        return _entries(found)
    except _WRONG:
        kept = [record for record in found if _is_sound(record)]
        where = "prompt {}, sample {}".format(*key_of(found[0]))
        faults.add(f"{name}, from {where} on: {len(found) - len(kept):,} lines are no entries of a log")
        return _entries(kept) if kept else None


def _is_sound(record: Fields) -> bool:
    try:
        _arrays([record])
    except _WRONG:
        return False
    return True


def _arrays(found: list[Fields]) -> dict[str, np.ndarray]:
    """The columns of some entries; an error where a value is of another kind than a run writes."""
    columns: dict[str, Any] = dict(zip(_COLUMNS, zip(*map(_values, found), strict=True), strict=True))
    for name in ("token", "drafted"):
        columns[name] = [NONE if token is None else token for token in columns[name]]
    for name, code in (("drafter", _drafter), ("status", _status)):
        columns[name] = list(map(code, columns[name]))
    arrays = {}
    for name, values in columns.items():
        if name in ("margin", "logprob"):
            arrays[name] = np.array(values, np.float64)
            continue
        array = np.array(values)
        if array.dtype != np.int64 or array.min() < NONE or array.max() > _LARGEST:
            raise ValueError(name)
        arrays[name] = array
    return arrays


def _entries(found: list[Fields]) -> Entries:
    arrays = _arrays(found)
    new_sample = _changes(arrays["index"]) | _changes(arrays["sample"])
    new_round = new_sample | _changes(arrays["round"])
    rounds = np.flatnonzero(new_round)
    depth = np.arange(len(found)) - rounds[np.cumsum(new_round) - 1]
    kept = {name: arrays[name] for name in ("position", "round", "token", "drafted", "drafter", "status", "margin")}
    return Entries(found, samples=np.flatnonzero(new_sample), rounds=rounds, depth=depth, **kept)


def _changes(values: np.ndarray) -> np.ndarray:
    """Where a value is not the one before it; true at the first."""
    changes = np.empty(len(values), bool)
    changes[0] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
