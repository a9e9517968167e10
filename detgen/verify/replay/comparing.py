"""Compare lines with derived ones byte for byte, and put differences into words.

The files of a run are read side by side: lines by prompt and sample, in order, however damaged they are.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from detgen.engine.request import TokenLogprobs, TokenRecord
from detgen.outputs import dump
from detgen.outputs.lines import log_lines
from detgen.outputs.log_file import DamagedError, TornError, contents
from detgen.outputs.records import log_entry
from detgen.verify.replay.result import AuditResult

Key = tuple[int, int]  # index of the prompt, number of the sample
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 120
Place = tuple[Any, ...]  # a field, and the index in it if it is a list
# Judges a value that differs from the derived one, given the derived line: "tie" if rounding explains it, "free" if
# it is allowed there, else None.
Allow = Callable[[Place, Any, Any, dict[str, Any]], str | None]


class Line(NamedTuple):
    """One line of a file.

    Attributes:
        where: file and line number.
        raw: its bytes, including the line end.
        fields: its fields.
        key: the prompt and sample that it claims to belong to.
    """

    where: str
    raw: bytes
    fields: dict[str, Any]
    key: Key


def in_words(key: Key) -> str:
    """Return a key in words."""
    return f"prompt {key[0]}, sample {key[1]}"


class Lines:
    """Lines of one file, of which memory holds one.

    Args:
        path: the file.
        stopped: whether the run has not finished, so that its last line may be torn.
        result: receives a finding for each line that is not valid.

    Attributes:
        torn: the last line of a stopped run, if it has no end.
    """

    def __init__(self, path: Path, *, stopped: bool, result: AuditResult) -> None:
        self.torn = b""
        self._name, self._stopped, self._result = path.name, stopped, result
        self._lines: Iterator[Line] = self._read(path) if path.is_file() else iter(())
        self._held: Line | None = None

    def peek(self) -> Line | None:
        """Return the next line without taking it; None at the end."""
        if self._held is None:
            self._held = next(self._lines, None)
        return self._held

    def take(self, key: Key) -> Line | None:
        """Take the next line if it is one of `key`; lines that should have come before it are findings."""
        while (line := self.peek()) is not None and line.key <= key:
            self._held = None
            if line.key == key:
                return line
            self._result.add(line.where, f"is {in_words(line.key)}, but {in_words(key)} comes here", "line")
        return None

    def take_all(self, key: Key) -> list[Line]:
        """Take the next lines while they belong to `key`."""
        found = []
        while (line := self.take(key)) is not None:
            found.append(line)
        return found

    def rest(self) -> None:
        """Take the lines that are left; each is a finding."""
        while (line := self.peek()) is not None:
            self._held = None
            self._result.add(line.where, "comes after the last prompt's output", "line")

    def _read(self, path: Path) -> Iterator[Line]:
        with path.open("rb") as file:
            for number, raw in enumerate(self._raw(file), start=1):
                where = f"{self._name}:{number}"
                if self._stopped and not raw.endswith(b"\n"):
                    self.torn = raw
                    return
                fields = parse(raw)
                if fields is None:
                    self._result.add(where, "is not a line of a run", "line")
                else:
                    yield Line(where, raw, fields, (fields["index"], fields["sample"]))

    def _raw(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield lines with their ends; an incomplete compressed file is a finding unless the run was stopped."""
        rest = b""
        try:
            for block in contents(file, self._name):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line + b"\n" for line in lines)
        except DamagedError as error:
            if not (self._stopped and isinstance(error, TornError)):
                self._result.add(self._name, str(error), "file")
        if rest:
            yield rest


def parse(raw: bytes) -> dict[str, Any] | None:
    """Parse a line that names its prompt and sample; return None if it does not."""
    try:
        fields = json.loads(raw.decode())  # given bytes, json would guess the encoding
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not type(fields.get("index")) is type(fields.get("sample")) is int:
        return None
    return fields


def shown(value: object) -> str:
    """Return a short form of a value, which may be long or deeply nested."""
    return _SHOWN.repr(value)


def compare_line(line: Line, derived: bytes, result: AuditResult, allow: Allow = lambda *_: None) -> bytes:
    """Compare a line with the derived one; differences go to the result.

    Args:
        line: a line of a run.
        derived: the line as it must be.
        result: receives the findings.
        allow: judges each value that differs.

    Returns:
        The derived line, with the values of `line` that are allowed.
    """
    if line.raw == derived:
        return derived
    return _compare(line, json.loads(derived), result, allow, lambda fields: dump(fields) + "\n")


def compare_log(lines: list[Line], derived: bytes, result: AuditResult, allow: Allow = lambda *_: None) -> bytes:
    """Do the same for the acceptance log of a sample, whose lines have the fields of their entries."""
    wants = derived.splitlines(keepends=True)
    for line in lines[len(wants) :]:
        result.add(line.where, f"is one too many of {in_words(line.key)}", "line")
    for at, (line, want) in enumerate(zip(lines, wants, strict=False)):
        if line.raw != want:
            wants[at] = _compare(line, log_entry(json.loads(want)), result, allow, _log_line)
    return b"".join(wants)


def _log_line(fields: dict[str, Any]) -> str:
    """Return the line of an entry."""
    record = TokenRecord(*(fields[name] for name in TokenRecord._fields))
    return log_lines(fields["index"], fields["sample"], [record])


def _compare(
    line: Line, fields: dict[str, Any], result: AuditResult, allow: Allow, spell: Callable[[dict[str, Any]], str]
) -> bytes:
    """Compare the fields of a line, then their spelling; returns as `compare_line`."""
    faults, ties = result.faults, list[str]()

    def settle(path: Place, found: Any, wanted: Any) -> Any:
        if found == wanted:
            return wanted
        if len(path) == 1 and type(found) is type(wanted) is list and len(found) == len(wanted):
            return [settle((*path, i), *pair) for i, pair in enumerate(zip(found, wanted, strict=True))]
        allowed = allow(path, found, wanted, fields)
        what = _difference(path, found, wanted)
        if allowed is None:
            result.add(line.where, what, "line")
        elif allowed == "tie":
            ties.append(what)
        return wanted if allowed is None else found

    settled = {name: settle((name,), line.fields.get(name), wanted) for name, wanted in fields.items()}
    if unknown := [name for name in line.fields if name not in fields]:
        result.add(line.where, f"has {', '.join(map(ascii, unknown))[:200]}, which no run writes here", "line")
    if ties:
        result.add(line.where, ties[0] + (f", and {len(ties) - 1} more" if ties[1:] else ""), "tie")
    accepted = spell(settled).encode()
    if result.faults == faults and line.raw != accepted:
        result.add(line.where, _spelling(line.raw, accepted), "line")
    return accepted


def plausible(entry: TokenLogprobs, token: int, wanted: int, greedy: bool, vocabulary: int) -> bool:
    """Return whether some logits could give a token's log-probability and those of the most likely tokens."""
    ids, values = [t for t, _ in entry.top], [p for _, p in entry.top]
    ordered = all((-p, t) < (-q, u) for (t, p), (u, q) in pairwise(entry.top))
    if len(ids) != wanted or not ordered or not all(0 <= t < vocabulary for t in ids) or len(set(ids)) < len(ids):
        return False
    if not all(value <= 0 for value in (entry.logprob, *values)) or (greedy and ids and ids[0] != token):
        return False
    if token in ids:
        return values[ids.index(token)] == entry.logprob
    return not values or entry.logprob <= values[-1]


def _difference(path: Place, found: Any, wanted: Any) -> str:
    """Describe how a value differs; of lists of different lengths, the first entry that does."""
    name = f"{path[0]}[{path[1]}]" if len(path) > 1 else path[0]
    if len(path) > 1 or type(found) is not list or type(wanted) is not list:
        return f"{name} is {shown(found)}, should be {shown(wanted)}"
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    there, instead = (shown(entries[at]) if at < len(entries) else "nothing" for entries in (found, wanted))
    lengths = f"has {len(found):,} entries, should have {len(wanted):,}"
    return f"{name} {lengths}; {name}[{at}] is {there}, should be {instead}"


def _spelling(found: bytes, wanted: bytes) -> str:
    """Describe where two spellings of a line begin to differ."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    there, instead = found[at : at + 20], wanted[at : at + 20]
    return f"is not spelled as a run spells it, from byte {at}: {there!r} instead of {instead!r}"
