"""What a generation commits, as digests per position; and where two generations differ.

A digest is eight bytes of BLAKE2b over the raw bits of a row: -0.0 differs from 0.0, and memory stays small.
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
    """One sample: what it says, and digests of the canonical values behind it.

    Attributes:
        prompt: tokens of the prompt.
        tokens: the completion's.
        line: the output line of the sample, without its place in the input.
        parts: what is known of these, by name. `logits`: a digest per token of the completion, unless passes may be in
            one call. `keys` and `values`: a digest per cached position, prompt first. Of a model that thinks, `state`:
            a digest of the state of each chunk whose rows were read, and `thought`: the thought of each full chunk of
            them, empty ones too. Nothing is known from another program's files.
        chunk: tokens of a chunk; 0 if not known.
    """

    prompt: int
    tokens: tuple[int, ...]
    line: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    chunk: int = 0


def line_of(raw: str) -> dict[str, Any]:
    """What an output line says of a sample, wherever its prompt stands."""
    line: dict[str, Any] = json.loads(raw)
    del line["index"]
    return line


def digests(x: Array) -> list[bytes]:
    """A digest of each x[i]."""
    return [blake2b(row.tobytes(), digest_size=8).digest() for row in bits(x)]


class Watching:
    """A trace that keeps digests; `pieces` are of the target's tokenizer, and see `Trace` for `chains`."""

    def __init__(self, pieces: Pieces, *, chains: bool = False) -> None:
        self.chains, self._pieces = chains, pieces
        self._parts: dict[Key, dict[str, list[Any]]] = {}
        self._chunk = 0

    def committed(self, seq: Sequence, first: int, logits: Array) -> None:
        """See `Trace`; unverified sequences are left out, since nothing is promised of them."""
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
        """A finished sample with its digests."""
        parts = self._parts.get((done.request.id, done.sample), {})
        line = line_of(output_line(done, self._pieces))
        return Observed(done.prompt_tokens, done.token_ids, line, parts, self._chunk)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which a sample differs from its reference.

    Attributes:
        id: of the request.
        sample: which of its samples.
        what: "token", "logits", "keys", "values", "state", "thought", "line" (anything else of it) or "missing".
        position: in prompt and completion, of the first row that differs; its logits choose the next token.
        place: index of that token in the completion; negative within the prompt.
        tokens: that token in the reference and here; None if there is none.
    """

    id: str | int
    sample: int
    what: str
    position: int
    place: int
    tokens: tuple[int | None, int | None] = (None, None)


@dataclass(slots=True)
class Tally:
    """What was compared and what was equal; tallies add up.

    Attributes:
        settings: generations.
        samples: their samples.
        positions: cached positions compared.
        entries_equal: those whose keys and values have equal bits.
        logits: committed tokens whose logits were compared.
        logits_equal: those whose logits have equal bits.
        tokens: committed tokens compared.
        tokens_different: those that differ.
        chunks: chunks of a thinking model whose states and thoughts were compared.
        chunks_equal: those whose states have equal bits and whose thoughts equal tokens.
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
        """Count another one in."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def equal(self) -> bool:
        """Whether every bit that was compared is equal."""
        pairs = (self.positions, self.entries_equal), (self.logits, self.logits_equal), (self.chunks, self.chunks_equal)
        return all(compared == equal for compared, equal in pairs) and not self.tokens_different


def compare(reference: Mapping[Key, Observed], found: Mapping[Key, Observed], tally: Tally) -> Difference | None:
    """Compare the samples of a generation with those of the reference; the difference of the first that differs.

    Args:
        reference: of all samples that should be there.
        found: those that are.
        tally: is told what was compared.
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
    """The difference at the earliest row; of one row the cause before its effects."""
    row = want.prompt - 1  # it chooses the first token
    places = {  # of each part, causes first: the row of its first entry, and rows an entry
        "state": (0, want.chunk),
        "keys": (0, 1),
        "values": (0, 1),
        "logits": (row, 1),
        "thought": (want.chunk - 1, want.chunk),  # it follows the chunk's last row
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
    """The first index at which two lists differ, also by ending."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
