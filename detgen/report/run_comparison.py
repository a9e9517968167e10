"""Compare two runs: which requests differ, and where they first do.

Requests are matched by id and sample, so the prompts may be in another order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from detgen.outputs import differences
from detgen.outputs.records import parse_line
from detgen.report.log import Entries, Key, key_of
from detgen.report.streaming import Faults, Fields, blocks, open_file, records

_KEPT = 50  # differences that are shown
_AROUND = 80  # characters of a text that are shown on either side

Name = tuple[str | int, int]  # id, sample


@dataclass(slots=True)
class Difference:
    """A sample that differs.

    Attributes:
        name: its id and number.
        what: how it differs, in words.
        keys: its keys in the two runs; None if a run does not have it.
        position: the first token that differs; None if no token does.
        tokens: the tokens at that position; None after the end.
        common: the end of the common part of the texts.
        texts: how each continues.
        entries: entries of both logs at that position; None if they have none.
    """

    name: Name
    what: str
    keys: tuple[Key | None, Key | None]
    position: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    common: str = ""
    texts: tuple[str, str] = ("", "")
    entries: list[Fields | None] = field(default_factory=lambda: [None, None])

    def see(self, side: int, record: Fields) -> None:
        """Keep an entry of one of the two logs if it is at the position."""
        if record["position"] == self.position and record["token"] is not None:
            self.entries[side] = record


@dataclass(slots=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        samples: number of samples in both.
        equal: number of samples that do not differ.
        kinds: counts of the differences, in words.
        kept: the first differences, in the order of the input.
        first: samples by the length in bits of the position of their first different token.
        manifests: differences that can change an output, as named by `differences`.
        settings: name and both values of settings that differ but change no output.
        same_bytes: whether the manifests say that both output files are equal.
    """

    samples: int = 0
    equal: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    kept: list[Difference] = field(default_factory=list)
    first: Counter[int] = field(default_factory=Counter)
    manifests: list[str] = field(default_factory=list)
    settings: list[tuple[str, Any, Any]] = field(default_factory=list)
    same_bytes: bool = False

    def see(self, side: int, entries: Entries) -> None:
        """Look up the entries at the first differences in one of the two logs."""
        wanted: dict[Key | None, Difference] = {d.keys[side]: d for d in self.kept if d.position is not None}
        for number, key in enumerate(entries.keys() if wanted else ()):
            if (found := wanted.get(key)) is not None:
                for record in entries.of_sample(number):
                    found.see(side, record)


def compare(folders: tuple[Path, Path], manifests: tuple[Fields, Fields], faults: Faults) -> Comparison:
    """Compare the outputs of two runs.

    Args:
        folders: the output folders; places of the second one's lines are held in memory.
        manifests: their manifests.
        faults: receives what is wrong with the second one's lines; the first one's are checked elsewhere.

    Raises:
        OutputError: if they cannot be read.
    """
    found = Comparison(manifests=differences(*manifests))
    digests = [m.get("files", {}).get("outputs.jsonl", {}).get("sha256") for m in manifests]
    found.same_bytes = digests[0] == digests[1] is not None
    for name, value in manifests[0]["settings"].items():
        if (other := manifests[1]["settings"][name]) != value:
            found.settings.append((name, value, other))
    path = folders[1] / "outputs.jsonl"
    places = _places(path, manifests[1], faults)
    with open_file(path) as file:
        for block in blocks(folders[0] / "outputs.jsonl", manifests[0], Faults()):
            for _, line in records(block, "outputs.jsonl", Faults()):
                name = _name(line)
                other = None
                if (offset := places.pop(name, None)) is not None:
                    file.seek(offset)
                    other = parse_line(file.readline())
                if other is None:
                    _note(found, Difference(name, "is only in the first run", (key_of(line), None)))
                    continue
                found.samples += 1
                if (difference := _difference(name, line, other)) is None:
                    found.equal += 1
                else:
                    _note(found, difference)
    for name in places:
        _note(found, Difference(name, "is only in the second run", (None, None)))
    return found


def _places(path: Path, manifest: Fields, faults: Faults) -> dict[Name, int]:
    """Return the offsets of the lines of a file."""
    found: dict[Name, int] = {}
    for block in blocks(path, manifest, faults):
        found |= {_name(line): at for at, line in records(block, path.name, faults)}
    return found


def _name(line: Fields) -> Name:
    return line["id"], line["sample"]


def _note(found: Comparison, difference: Difference) -> None:
    found.kinds[difference.what] += 1
    if difference.position is not None:
        found.first[difference.position.bit_length()] += 1
    if len(found.kept) < _KEPT:
        found.kept.append(difference)


def _difference(name: Name, a: Fields, b: Fields) -> Difference | None:
    """Describe how two lines of a sample differ; None if only their places in the input do."""
    keys = key_of(a), key_of(b)
    if "error" in a or "error" in b:
        if a.get("error") == b.get("error"):
            return None
        what = "ends with an error in one run" if ("error" in a) != ("error" in b) else "has another error"
        return Difference(name, what, keys, texts=(str(a.get("error", "a text")), str(b.get("error", "a text"))))
    for field_, words in (("prompt_tokens", "has another prompt"), ("seed", "has another seed")):
        if a.get(field_) != b.get(field_):
            return Difference(name, words, keys)
    pairs = enumerate(zip_longest(a["token_ids"], b["token_ids"]))
    for position, (one, other) in pairs:
        if one != other:
            common, texts = _parted(a["text"], b["text"])
            what = "has another token" if None not in (one, other) else "is longer in one run"
            return Difference(name, what, keys, position, (one, other), common, texts)
    wrong = [key for key in {**a, **b} if key != "index" and a.get(key) != b.get(key)]
    return Difference(name, f"has the same tokens, but differs in {', '.join(wrong)[:80]}", keys) if wrong else None


def _parted(a: str, b: str) -> tuple[str, tuple[str, str]]:
    """Return the end of the common part of two texts, and how each continues."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[max(at - _AROUND, 0) : at], (a[at : at + _AROUND], b[at : at + _AROUND])
