"""The output lines of a run: totals, errors, thoughts, and the place of each line, so that a few can be read again."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from detgen.outputs.records import parse_line
from detgen.report.log import Key, key_of
from detgen.report.streaming import Faults, Fields, blocks, open_file, records

_ERRORS = 50  # error lines that are kept
_KINDS = 1000  # different errors, or thoughts, that are counted separately


@dataclass(slots=True)
class Places:
    """Offsets of the lines of `outputs.jsonl`, 24 bytes per line, in the order of the file, that of the keys."""

    path: Path
    indexes: array[int] = field(default_factory=lambda: array("q"))
    samples: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))

    def add(self, key: Key, offset: int) -> None:
        """Add a line."""
        self.indexes.append(key[0])
        self.samples.append(key[1])
        self.offsets.append(offset)

    def read(self, key: Key) -> Fields | None:
        """Read the line of a sample; None if there is none."""
        at = bisect_left(self.indexes, key[0])
        while at < len(self.indexes) and self.indexes[at] == key[0]:
            if self.samples[at] == key[1]:
                with open_file(self.path) as file:
                    file.seek(self.offsets[at])
                    return parse_line(file.readline())
            at += 1
        return None


@dataclass(slots=True)
class Thoughts:
    """The thoughts of a thinking model over a run.

    Attributes:
        samples: number of samples that have any thought.
        prompt: thoughts after chunks that begin in a prompt.
        completion: thoughts after the other chunks.
        texts: counts of the first thousand different thoughts.
        most: the sample with the most thoughts, and their number.
    """

    samples: int = 0
    prompt: int = 0
    completion: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    most: tuple[Key, int] = ((-1, -1), 0)


@dataclass(slots=True)
class Lines:
    """Totals of the output lines.

    Attributes:
        places: places of the lines.
        prompts: number of prompts.
        samples: samples with a text.
        failed: prompts with an error.
        tokens, prompt_tokens: counted as by `Totals`.
        reasons: samples by finish reason.
        errors: the first lines with an error.
        error_lines: number of lines with an error.
        kinds: counts of the errors, without their places in the input.
        asked: keys of the requests asked for, by id.
        thoughts: None if the model does not think.
    """

    places: Places
    prompts: int = 0
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: list[Fields] = field(default_factory=list)
    error_lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    asked: dict[str, list[Key]] = field(default_factory=dict)
    thoughts: Thoughts | None = None


def read_lines(folder: Path, manifest: Fields, asked: Collection[str], faults: Faults) -> Lines:
    """Read the output lines of a run.

    Args:
        folder: the output folder.
        manifest: manifest of the run.
        asked: ids of requests to look for.
        faults: receives what no run writes.

    Raises:
        OutputError: if they cannot be read.
    """
    path = folder / "outputs.jsonl"
    found = Lines(Places(path))
    latest, failed = (-1, -1), -1
    for block in blocks(path, manifest, faults):
        for at, line in records(block, path.name, faults):
            key = key_of(line)
            if key <= latest:
                faults.add(f"{path.name}: prompt {key[0]}, sample {key[1]} is out of order")
                continue
            if "error" in line:
                found.failed += failed != key[0]
                failed = key[0]
            found.prompts += key[0] != latest[0]
            _add(found, line, key)
            found.places.add(key, at)
            if str(line["id"]) in asked:
                found.asked.setdefault(str(line["id"]), []).append(key)
            latest = key
    return found


def _add(found: Lines, line: Fields, key: Key) -> None:
    """Count a line."""
    if "error" in line:
        error = line["error"]
        found.error_lines += 1
        if len(found.errors) < _ERRORS:
            found.errors.append(line)
        if len(found.kinds) < _KINDS or kind_of(error) in found.kinds:
            found.kinds[kind_of(error)] += 1
        return
    found.samples += 1
    found.tokens += len(line["token_ids"])
    found.prompt_tokens += line["prompt_tokens"] if key[1] == 0 else 0
    found.reasons[line["finish_reason"]] += 1
    if "thoughts" in line:
        found.thoughts = found.thoughts or Thoughts()
        _add_thoughts(found.thoughts, line["thoughts"], line["prompt_tokens"], key)


def _add_thoughts(found: Thoughts, thoughts: list[tuple[int, str]], prompt_tokens: int, key: Key) -> None:
    found.samples += bool(thoughts)
    if len(thoughts) > found.most[1]:
        found.most = key, len(thoughts)
    for first, text in thoughts:
        found.prompt += first < prompt_tokens
        found.completion += first >= prompt_tokens
        if len(found.texts) < _KINDS or text in found.texts:
            found.texts[text] += 1


def kind_of(error: str) -> str:
    """Return an error without its place in the input, such as `prompts.jsonl:7: `."""
    place, colon, rest = error.partition(": ")
    return rest if colon and place.rpartition(":")[2].isdigit() else error
