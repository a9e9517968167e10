"""What a generation commits, as digests per position; and where two generations differ.

A digest is eight bytes of BLAKE2b over the raw bits of a row: -0.0 differs from 0.0, and memory stays small.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion
from detgen.engine.sequence import Sequence
from detgen.kernels.bits import bits
from detgen.outputs.lines import output_line

Key = tuple[str | int, int]  # request id, sample
_Listed = list[Any] | tuple[Any, ...]


@dataclass(slots=True)
class Observed:
    """One sample: what it says, and digests of the canonical values behind it.

    Attributes:
        prompt: tokens of the prompt.
        tokens: the completion's.
        line: the output line of the sample, without its place in the input.
        logits: a digest per token of the completion; None where passes may be in one call, and from another program's
            files.
        keys: a digest per cached position, prompt first; None from another program's files.
        values: as keys.
        states: a digest of the state of each chunk whose rows were read; None if the model does not think, and from
            files.
        thoughts: the thought of each full chunk of them, empty ones too; likewise.
        chunk: tokens of a chunk; 0 if not known.
    """

    prompt: int
    tokens: tuple[int, ...]
    line: dict[str, Any] = field(default_factory=dict)
    logits: list[bytes] | None = None
    keys: list[bytes] | None = None
    values: list[bytes] | None = None
    states: list[bytes] | None = None
    thoughts: list[tuple[int, ...]] | None = None
    chunk: int = 0


def line_of(raw: str) -> dict[str, Any]:
    """What an output line says of a sample, wherever its prompt stands."""
    line: dict[str, Any] = json.loads(raw)
    del line["index"]
    return line


def digests(x: torch.Tensor) -> list[bytes]:
    """A digest of each x[i]."""
    rows = bits(x).flatten(1).cpu().numpy()
    return [blake2b(row, digest_size=8).digest() for row in rows]


class Watching:
    """A trace that keeps digests; `pieces` are of the target's tokenizer, and see `Trace` for `chains`."""

    def __init__(self, pieces: Pieces, *, chains: bool = False) -> None:
        self.chains, self._pieces = chains, pieces
        self._logits: dict[Key, list[bytes]] = {}
        self._entries: dict[Key, tuple[list[bytes], list[bytes]]] = {}
        self._read: dict[Key, tuple[list[bytes], list[tuple[int, ...]], int]] = {}

    def committed(self, seq: Sequence, first: int, logits: torch.Tensor) -> None:
        """See `Trace`; unverified sequences are left out, since nothing is promised of them."""
        if seq.deterministic:
            known = self._logits.setdefault((seq.request.id, seq.sample), [])
            known[first:] = digests(logits)

    def finished(self, seq: Sequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `Trace`."""
        by_position = [digests(x.transpose(0, 1)) for x in (keys, values)]
        key = seq.request.id, seq.sample
        self._entries[key] = by_position[0], by_position[1]
        if seq.states:
            self._read[key] = digests(torch.stack(seq.states)), list(seq.thoughts), len(seq.states[0])

    def observed(self, done: Completion) -> Observed:
        """A finished sample with its digests."""
        key = done.request.id, done.sample
        keys, values = self._entries.get(key, (None, None))
        states, thoughts, chunk = self._read.get(key, (None, None, 0))
        return Observed(
            done.prompt_tokens,
            done.token_ids,
            line_of(output_line(done, self._pieces)),
            self._logits.get(key),
            keys,
            values,
            states,
            thoughts,
            chunk,
        )


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
    if got.logits is not None and want.logits is not None:
        tally.logits += longest
        tally.logits_equal += _equal(want.logits, got.logits)
    if got.keys is not None and got.values is not None and want.keys is not None and want.values is not None:
        tally.positions += max(len(want.keys), len(got.keys))
        both = zip(zip(want.keys, want.values, strict=True), zip(got.keys, got.values, strict=True), strict=False)
        tally.entries_equal += sum(a == b for a, b in both)
    if want.states is not None and got.states is not None:
        tally.chunks += max(len(want.states), len(got.states))
        tally.chunks_equal += _equal(_chunks(want), _chunks(got))


def _chunks(seen: Observed) -> _Listed:
    """State and thought of each chunk; the last, partial one has no thought."""
    return list(itertools.zip_longest(seen.states or (), seen.thoughts or ()))


def _equal(a: _Listed, b: _Listed) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


def _first(key: Key, want: Observed, got: Observed) -> Difference | None:
    """The difference at the earliest row; of one row the cause before its effects."""
    row = want.prompt - 1  # it chooses the first token
    found: list[tuple[int, int, str]] = []
    parts: tuple[tuple[str, _Listed | None, _Listed | None, int, int], ...] = (
        ("state", want.states, got.states, 0, want.chunk),
        ("keys", want.keys, got.keys, 0, 1),
        ("values", want.values, got.values, 0, 1),
        ("logits", want.logits, got.logits, row, 1),
        ("thought", want.thoughts, got.thoughts, want.chunk - 1, want.chunk),  # it follows the chunk's last row
        ("token", want.tokens, got.tokens, row, 1),
    )
    for rank, (what, a, b, offset, width) in enumerate(parts):
        if a is not None and b is not None and (at := _differ(a, b)) is not None:
            found.append((offset + width * at, rank, what))
    if not found:
        if want.line == got.line:
            return None
        end = len(want.tokens) - 1
        return Difference(*key, "line", row + end, end)
    position, _, what = min(found)
    place = position - row
    token = lambda o: o.tokens[place] if 0 <= place < len(o.tokens) else None  # noqa: E731
    return Difference(*key, what, position, place, (token(want), token(got)))


def _differ(a: _Listed, b: _Listed) -> int | None:
    """The first index at which two lists differ, also by ending."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
