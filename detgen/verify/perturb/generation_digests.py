"""Digests per position of what a generation commits, and where two generations differ.

A digest is eight bytes of BLAKE2b over the raw bits of a row, so -0.0 differs from 0.0, and little memory is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion
from detgen.engine.sequence import Sequence
from detgen.outputs.lines import output_line
from detgen.program.arrays import Array, bits, stacked

Key = tuple[str | int, int]  # request id, sample


@dataclass(slots=True)
class Observed:
    """A sample: its output line, and digests of the canonical values behind it.

    Attributes:
        prompt: number of prompt tokens.
        tokens: tokens of the completion.
        line: its output line without its place in the input.
        parts: what is known, by name. `logits`: a digest per token of the completion, unless there were chains. `keys`
            and `values`: a digest per cached position, prompt first. Of a model that thinks, `state`: a digest of the
            state of each chunk whose rows were read, and `thought`: the thought of each of these chunks that is full,
            also if empty. Empty for samples from another program's files.
        chunk: tokens per chunk; 0 if unknown.
    """

    prompt: int
    tokens: tuple[int, ...]
    line: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    chunk: int = 0


def line_of(raw: str) -> dict[str, Any]:
    """Return the fields of a sample's output line without the index of its prompt."""
    line: dict[str, Any] = json.loads(raw)
    del line["index"]
    return line


def digests(x: Array) -> list[bytes]:
    """Return a digest of each x[i]."""
    return [blake2b(row.tobytes(), digest_size=8).digest() for row in bits(x)]


class Watching:
    """A trace that keeps digests; `pieces` are the target tokenizer's; see `Trace` for `chains`."""

    def __init__(self, pieces: Pieces, *, chains: bool = False) -> None:
        self.chains, self._pieces = chains, pieces
        self._parts: dict[Key, dict[str, list[Any]]] = {}
        self._chunk = 0

    def committed(self, seq: Sequence, first: int, logits: Array) -> None:
        """See `Trace`. Unverified sequences are left out, since nothing is promised for them."""
        if seq.deterministic:
            self._of(seq).setdefault("logits", [])[first:] = digests(logits)

    def finished(self, seq: Sequence, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Trace`."""
        parts = self._of(seq)
        parts["keys"], parts["values"] = (digests(x.swapaxes(0, 1)) for x in (keys, values))
        if seq.states:
            parts["state"], parts["thought"] = digests(stacked(seq.states)), list(seq.thoughts)
            self._chunk = len(seq.states[0])

    def _of(self, seq: Sequence) -> dict[str, list[Any]]:
        return self._parts.setdefault((seq.request.id, seq.sample), {})

    def observed(self, done: Completion) -> Observed:
        """Return a finished sample with its digests."""
        parts = self._parts.get((done.request.id, done.sample), {})
        line = line_of(output_line(done, self._pieces))
        return Observed(done.prompt_tokens, done.token_ids, line, parts, self._chunk)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a sample from its reference.

    Attributes:
        id: id of the request.
        sample: number of the sample.
        what: "token", "logits", "keys", "values", "state", "thought", "line" (anything else in it) or "missing".
        position: position in prompt and completion of the first row that differs; its logits choose the next token.
        place: index of that next token in the completion; negative within the prompt.
        tokens: that token in the reference and here; None if missing.
    """

    id: str | int
    sample: int
    what: str
    position: int
    place: int
    tokens: tuple[int | None, int | None] = (None, None)


@dataclass(slots=True)
class Tally:
    """Counts of what was compared and what was equal; tallies add up.

    Attributes:
        settings: generations.
        samples: number of their samples.
        positions: cached positions compared.
        entries_equal: positions whose keys and values have equal bits.
        logits: committed tokens whose logits were compared.
        logits_equal: tokens whose logits have equal bits.
        tokens: committed tokens compared.
        tokens_different: tokens that differ.
        chunks: chunks of a thinking model whose states and thoughts were compared.
        chunks_equal: chunks whose states have equal bits and whose thoughts have equal tokens.
    """

    settings: int = 0
    samples: int = 0
    positions: int = 0
    entries_equal: int = 0
    logits: int = 0
    logits_equal: int = 0
    tokens: int = 0
    tokens_different: int = 0
    chunks: int = 0
    chunks_equal: int = 0

    def add(self, other: Tally) -> None:
        """Add another tally."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def equal(self) -> bool:
        """Whether every compared bit is equal."""
        pairs = (self.positions, self.entries_equal), (self.logits, self.logits_equal), (self.chunks, self.chunks_equal)
        return all(compared == equal for compared, equal in pairs) and not self.tokens_different


def compare(reference: Mapping[Key, Observed], found: Mapping[Key, Observed], tally: Tally) -> Difference | None:
    """Compare a generation's samples with the reference's. Return the difference of the first that differs.

    Args:
        reference: all samples that should be there.
        found: the samples that are there.
        tally: receives the counts.
    """
    differences = []
    for key, want in reference.items():
        if (got := found.get(key)) is None:
            differences.append(Difference(*key, "missing", 0, -want.prompt))
            tally.tokens += len(want.tokens)
            tally.tokens_different += len(want.tokens)
        else:
            _count(tally, want, got)
            differences += filter(None, [_first(key, want, got)])
    return differences[0] if differences else None


def _count(tally: Tally, want: Observed, got: Observed) -> None:
    tally.samples += 1
    longest = max(len(want.tokens), len(got.tokens))
    tally.tokens += longest
    tally.tokens_different += longest - _equal(want.tokens, got.tokens)
    for counted, equal, names in (
        ("logits", "logits_equal", ("logits",)),
        ("positions", "entries_equal", ("keys", "values")),
        ("chunks", "chunks_equal", ("state", "thought")),  # the last, partial chunk has no thought
    ):
        if all(name in seen.parts for name in names for seen in (want, got)):
            a, b = (list(itertools.zip_longest(*(seen.parts[name] for name in names))) for seen in (want, got))
            setattr(tally, counted, getattr(tally, counted) + max(len(a), len(b)))
            setattr(tally, equal, getattr(tally, equal) + _equal(a, b))


def _equal(a: Iterable[Any], b: Iterable[Any]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


def _first(key: Key, want: Observed, got: Observed) -> Difference | None:
    """Return the difference at the earliest row; within a row, causes come before effects."""
    row = want.prompt - 1  # this row chooses the first token
    places = {  # of each part, causes first: the row of its first entry, and rows per entry
        "state": (0, want.chunk),
        "keys": (0, 1),
        "values": (0, 1),
        "logits": (row, 1),
        "thought": (want.chunk - 1, want.chunk),  # follows the chunk's last row
        "token": (row, 1),
    }
    ours, theirs = ({**seen.parts, "token": list(seen.tokens)} for seen in (want, got))
    found = [
        (offset + width * at, rank, what)
        for rank, (what, (offset, width)) in enumerate(places.items())
        if what in ours and what in theirs and (at := _differ(ours[what], theirs[what])) is not None
    ]
    if not found:
        end = len(want.tokens) - 1
        return None if want.line == got.line else Difference(*key, "line", row + end, end)
    position, _, what = min(found)
    place = position - row
    token = lambda o: o.tokens[place] if 0 <= place < len(o.tokens) else None  # noqa: E731
    return Difference(*key, what, position, place, (token(want), token(got)))


def _differ(a: list[Any], b: list[Any]) -> int | None:
    """Return the first index at which two lists differ, or one ends."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
