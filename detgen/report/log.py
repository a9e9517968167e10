"""The acceptance log as columns: blocks of whole samples, for arithmetic on all of their entries at once.

Arrow reads the lines, five times as fast as Python would make objects of them. Lines become objects only on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from detgen.drafters.registry import DRAFTERS
from detgen.engine.request import Status
from detgen.outputs.manifest import log_name
from detgen.outputs.records import LEFT_OUT, AcceptanceLine, is_acceptance, keys_of
from detgen.report.streaming import Faults, Fields, blocks

STATUSES: tuple[Status, ...] = get_args(Status)
NAMES = tuple(name for name in DRAFTERS if name != "auto")  # drafters that a log can have
NONE = -1  # in place of a token that was not committed or not drafted

_TYPES = {name: key.type for name, key in keys_of(AcceptanceLine).items()}
_WHOLE = tuple(name for name, type_ in _TYPES.items() if type_ is int and name not in LEFT_OUT)
_TOKENS = tuple(name for name, type_ in _TYPES.items() if type_ is int and name in LEFT_OUT)
_SCORES = tuple(name for name, type_ in _TYPES.items() if type_ is float)
_CODES = {"drafter": pa.array(NAMES), "status": pa.array(STATUSES)}
_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in (*_WHOLE, *_TOKENS)]
    + [(name, pa.string()) for name in _CODES]
    + [(name, pa.float64()) for name in _SCORES]
)
_PARSING = arrow_json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="error")
_COLUMNS = (*_WHOLE, *_TOKENS, *_CODES, *_SCORES)

Key = tuple[int, int]  # index of the prompt, number of the sample


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of whole samples, in the order of the log.

    Attributes:
        lines: lines of the log.
        index, sample, position, round: int64 [entries].
        token, drafted: int64 [entries]; NONE for no token.
        drafter, status: int64 [entries], indices in NAMES and STATUSES.
        margin, logprob: float64 [entries], of float32 precision; nan for none.
        samples: int64 [samples], the first entry of each sample.
        rounds: int64 [rounds], the first entry of each round.
        depth: int64 [entries], place in its round.
    """

    lines: list[bytes]
    index: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    round: np.ndarray
    token: np.ndarray
    drafted: np.ndarray
    drafter: np.ndarray
    status: np.ndarray
    margin: np.ndarray
    logprob: np.ndarray
    samples: np.ndarray
    rounds: np.ndarray
    depth: np.ndarray

    def record(self, number: int) -> Fields:
        """Return an entry as `log_entry` does."""
        found: Fields = {name: int(getattr(self, name)[number]) for name in _WHOLE}
        for name in _TOKENS:
            token = int(getattr(self, name)[number])
            found[name] = None if token == NONE else token
        found["drafter"], found["status"] = NAMES[self.drafter[number]], STATUSES[self.status[number]]
        for name in _SCORES:
            score = float(getattr(self, name)[number])
            found[name] = None if math.isnan(score) else score
        return found

    def of_sample(self, number: int) -> list[Fields]:
        """Return the entries of a sample."""
        first = int(self.samples[number])
        last = int(self.samples[number + 1]) if number + 1 < len(self.samples) else len(self.lines)
        return [self.record(i) for i in range(first, last)]

    def key(self, number: int) -> Key:
        """Return the key of a sample."""
        return int(self.index[self.samples[number]]), int(self.sample[self.samples[number]])

    def keys(self) -> list[Key]:
        """Return the keys of all samples."""
        index, sample = self.index[self.samples].tolist(), self.sample[self.samples].tolist()
        return list(zip(index, sample, strict=True))


def key_of(record: Fields) -> Key:
    """Return the key of an entry or an output line."""
    return record["index"], record["sample"]


def read_log(folder: Path, manifest: Fields, faults: Faults) -> Iterator[Entries]:
    """Read the acceptance log of a run, some thousand entries at a time; nothing if there is none.

    Args:
        folder: the output folder.
        manifest: manifest of the run.
        faults: receives lines that no run writes.

    Raises:
        OutputError: if it cannot be read.
    """
    held: list[bytes] = []  # lines of the sample whose entries may continue in the next block
    latest = (-1, -1)
    name = log_name(manifest)
    if name is None:
        return
    path = folder / name
    for block in blocks(path, manifest, faults):
        lines = held + block.raw.removesuffix(b"\n").split(b"\n")
        entries = _entries(lines, block.line - len(held), path.name, faults)
        if entries is None:
            held = []
            continue
        end = int(entries.samples[-1])
        held = entries.lines[end:]
        if end:
            entries = _made(entries.lines[:end], {name: getattr(entries, name)[:end] for name in _COLUMNS})
            latest = _check_order(entries, latest, path.name, faults)
            yield entries
    if held and (entries := _entries(held, 0, path.name, faults)) is not None:
        _check_order(entries, latest, path.name, faults)
        yield entries


def _check_order(entries: Entries, latest: Key, name: str, faults: Faults) -> Key:
    """Check that samples are in the order of the input. Return the last one's key."""
    index, sample = entries.index[entries.samples], entries.sample[entries.samples]
    back = (np.diff(index) < 0) | ((np.diff(index) == 0) & (np.diff(sample) < 0))
    if entries.key(0) <= latest or back.any():
        place = entries.key(int(back.argmax()) + 1 if back.any() else 0)
        faults.add(f"{name}: prompt {place[0]}, sample {place[1]} is out of order")
    return max(latest, entries.key(len(index) - 1))


def _entries(lines: list[bytes], first: int, name: str, faults: Faults) -> Entries | None:
    """Parse lines into entries; None if there are none. Lines that no run writes are faults.

    Args:
        lines: the lines without their ends.
        first: number of the first line.
        name: name of the file.
        faults: receives invalid lines.
    """
    try:
        return _made(lines, _columns(lines))
    except ValueError:  # pyarrow's own errors are ValueErrors, too
        pass
    kept = []
    for number, line in enumerate(lines, start=first):
        if _is_entry(line):
            kept.append(line)
        else:
            faults.add(f"{name}:{number}: is not a line of a run")
    return _made(kept, _columns(kept)) if kept else None


def _is_entry(line: bytes) -> bool:
    """Return whether a line is a valid entry."""
    if not is_acceptance(line):
        return False
    try:
        _columns([line])
    except ValueError:
        return False
    return True


def _columns(lines: list[bytes]) -> dict[str, np.ndarray]:
    """Parse lines into columns.

    Raises:
        ValueError: if a line is not a valid entry.
    """
    raw = b"\n".join(lines)
    if b"null" in raw:  # Arrow does not distinguish it from a missing key
        raise ValueError("null")
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(raw) + 1)
    table = arrow_json.read_json(pa.BufferReader(raw), read_options=options, parse_options=_PARSING)
    if table.num_rows != len(lines):
        raise ValueError("not one line per entry")
    found = {}
    for name in (*_WHOLE, *_CODES):
        column = table[name]
        if name in LEFT_OUT:
            column = column.fill_null(LEFT_OUT[name])
        if name in _CODES:
            column = pc.index_in(column, value_set=_CODES[name])
        if column.null_count:
            raise ValueError(name)
        found[name] = column.to_numpy().astype(np.int64, copy=False)
    for name in _TOKENS:
        found[name] = table[name].fill_null(NONE).to_numpy()
    unsaid = (found["drafted"] == NONE) & (found["status"] == STATUSES.index("accepted"))
    found["drafted"] = np.where(unsaid, found["token"], found["drafted"])
    if any(column.min() < NONE for column in found.values()) or found["position"].min() < 0:
        raise ValueError("a number below zero")
    _check_tokens(found["token"], found["drafted"], found["status"])
    for name in _SCORES:
        with np.errstate(over="ignore"):
            found[name] = table[name].to_numpy().astype(np.float32).astype(np.float64)
        if np.isinf(found[name]).any():
            raise ValueError("a number too large for float32")
    return found


def _check_tokens(token: np.ndarray, drafted: np.ndarray, status: np.ndarray) -> None:
    """Check that the tokens of entries fit their statuses.

    Raises:
        ValueError: if one does not.
    """
    right = np.select(
        [status == STATUSES.index(name) for name in ("accepted", "corrected", "rolled_back")],
        [
            (token == drafted) & (token != NONE),
            (token != drafted) & (token != NONE) & (drafted != NONE),
            (token == NONE) & (drafted != NONE),
        ],
        (token != NONE) & (drafted == NONE),
    )
    if not right.all():
        raise ValueError("tokens that do not go with the status")


def _made(lines: list[bytes], columns: dict[str, np.ndarray]) -> Entries:
    new_sample = _changes(columns["index"]) | _changes(columns["sample"])
    new_round = new_sample | _changes(columns["round"])
    rounds = np.flatnonzero(new_round)
    depth = np.arange(len(lines)) - rounds[np.cumsum(new_round) - 1]
    return Entries(lines, samples=np.flatnonzero(new_sample), rounds=rounds, depth=depth, **columns)


def _changes(values: np.ndarray) -> np.ndarray:
    """Return where a value differs from the one before it; true at the first."""
    changes = np.empty(len(values), bool)
    changes[0] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
