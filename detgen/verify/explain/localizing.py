"""Locate a difference: the first module whose output bits differ at the first row that differs.

Both generations run again with hooks on all modules, whatever their names, and on attention. If a sample was
preempted, several passes compute a position: for logits or a token the one that chose the token counts, for entries
the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from detgen.engine import Engine
from detgen.engine.request import Request
from detgen.engine.sequence import Sequence
from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Windows
from detgen.program.arrays import Array, array, bits, same_bits
from detgen.verify.perturb.generation_digests import Difference


@dataclass(slots=True)
class Recorded:
    """What a pass computed for the wanted row.

    Attributes:
        outputs: each module, its output for that row, and the number of rows it saw, in the order of the calls.
        rows: rows of the pass.
        row: the row's place among them.
        logits: float32 [vocabulary] of the row, if computed.
        entries: keys and values of the position when the sequence had finished.
        thoughts: of a model that thinks: the thoughts of the full chunks up to the row's own.
        chunk: tokens per chunk; 0 if the model does not think.
    """

    outputs: list[tuple[str, np.ndarray, int]] = field(default_factory=list)
    rows: int = 0
    row: int = 0
    logits: np.ndarray | None = None
    entries: tuple[np.ndarray, np.ndarray] | None = None
    thoughts: list[tuple[int, ...]] = field(default_factory=list)
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """The first module whose output differs.

    Attributes:
        module: its name; None if all modules agree.
        row: the row's place in the failing pass.
        ulp: largest distance, in representable numbers.
        elements: elements of the row that differ.
        rows: number of rows that the module saw in the reference and in the failing pass.
        note: further explanation, above all if no module differs.
    """

    module: str | None = None
    row: int = 0
    ulp: int = 0
    elements: int = 0
    rows: tuple[int, int] = (0, 0)
    note: str = ""

    def __str__(self) -> str:
        if self.module is None:
            return self.note
        found = f"{self.module}: row {self.row}, {self.ulp:,} ulp in {self.elements:,} elements"
        return f"{found}; shapes {self.rows[0]} and {self.rows[1]}" + (f"; {self.note}" if self.note else "")


class Recording:
    """Watches the passes of an engine for one position of one sample.

    Args:
        engine: whose passes.
        engine: the engine to watch.
    """

    chains = False  # modules are watched pass by pass

    def __init__(self, engine: Engine, difference: Difference) -> None:
        self._engine = engine
        self._difference = difference
        self._now: Recorded | None = None  # of the pass in progress, if it computes the position
        self._last: Recorded | None = None  # of the last pass that did
        self._chose: Recorded | None = None  # of the pass that chose the next token
        self._rows = 0
        self._asked = 0  # rows of the last layers
        self._wanted: list[int] = []
        self.found: Recorded | None = None
        self._logits: np.ndarray | None = None

    def run(self, queue: list[Request]) -> Recorded | None:
        """Generate the queue; return None if the sample did not finish."""
        with self._hooked():
            for _ in self._engine.stream(queue, trace=self):
                pass
        return self.found

    def _mine(self, seq: Sequence) -> bool:
        return (seq.request.id, seq.sample) == (self._difference.id, self._difference.sample)

    def committed(self, seq: Sequence, first: int, logits: Array) -> None:
        """See `Trace`."""
        at = self._difference.place - first
        if self._mine(seq) and 0 <= at < len(logits):
            self._logits = array(logits[at]).copy()
            self._chose = self._last

    def finished(self, seq: Sequence, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Trace`."""
        if self._mine(seq):
            self.found = (self._chose if self._difference.what in ("logits", "token") else self._last) or Recorded()
            self.found.logits = self._logits
            position = self._difference.position
            if position < keys.shape[1]:
                self.found.entries = keys[:, position].copy(), values[:, position].copy()
            if (thinking := self._engine.thinking) is not None:
                self.found.chunk = thinking.chunk
                self.found.thoughts = seq.thoughts[: position // thinking.chunk + 1]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        runner = self._engine.canonical
        run = runner.run

        def run_recorded(windows: Windows, broken: list[int] | None = None, **asked: Any) -> object:
            self._begin(windows)
            try:
                return run(windows, broken, **asked)
            finally:
                self._now = None  # the next pass may not compute the position

        instance: Any = runner
        instance.run = run_recorded
        try:
            with runner.decoder.telling(self._take_output), self._states_taken():
                yield
        finally:
            del instance.run

    @contextmanager
    def _states_taken(self) -> Iterator[None]:
        """Record the states that are added to a thinking model's rows, too."""
        thinking: Any = self._engine.thinking
        if thinking is None:
            yield
            return
        exchange = thinking.exchange

        def exchange_recorded(windows: Windows) -> Exchange:
            found: Exchange = exchange(windows)
            if (now := self._now) is not None:
                now.outputs.append(("the state that is added", array(found.states[now.row]).copy(), len(found.states)))
            return found

        thinking.exchange = exchange_recorded
        try:
            yield
        finally:
            del thinking.exchange

    def _take_output(self, name: str, output: object) -> None:
        self._take(name, output[0] if isinstance(output, tuple) and output else output)

    def _begin(self, windows: Windows) -> None:
        """Find the sample's row at the wanted position; a pass without it is ignored."""
        position, row = self._difference.position, 0
        self._wanted = []
        self._rows = len(windows.tokens)
        for w in windows:
            at = position - w.start
            if 0 <= at < len(w.tokens) and self._mine(self._engine.live[w.slot]):
                self._now = self._last = Recorded(rows=self._rows, row=row + at)
            row += len(w.tokens)
            self._wanted += range(row - w.logits, row)
        self._asked = max(len(self._wanted), 1)

    def _take(self, name: str, x: object) -> None:
        """Keep the wanted row of an output: [rows, ...] or [1, rows, ...]."""
        now = self._now
        if now is None or not hasattr(x, "shape"):
            return
        numbers = array(x)
        sizes = list(numbers.shape)
        if self._rows in sizes[:-1] or sizes == [self._rows]:
            dim, places = sizes.index(self._rows), list(range(self._rows))
        elif len(sizes) >= 2 and sizes[-2] == self._asked:  # the last layers see only the wanted rows
            dim, places = len(sizes) - 2, self._wanted
        else:
            return
        if now.row in places:
            now.outputs.append((name, numbers.take(places.index(now.row), dim), sizes[dim]))


def locate(reference: Recorded | None, found: Recorded | None) -> Origin:
    """Compare what the two generations computed for the row."""
    if reference is None or found is None:
        return Origin(note="one of the two generations did not finish this sample")
    rows = reference.rows, found.rows
    if not found.outputs or not reference.outputs:
        note = "no pass computed this position for this sample: another prompt with the same beginning did"
        if apart := _thought_apart(reference, found):
            note = f"{note}; {apart}"
        return Origin(rows=rows, note=note)
    for (name, a, few), (other, b, many) in zip(reference.outputs, found.outputs, strict=False):
        if name == other and a.shape == b.shape and not same_bits(a, b):
            return Origin(name, found.row, *_distance(a, b), (few, many), _thought_apart(reference, found))
    pairs = zip(reference.entries or (), found.entries or (), strict=False)
    if not all(same_bits(a, b) for a, b in pairs):
        note = "every module agrees at this row, but its cached keys and values were changed after the pass"
    elif reference.logits is not None and found.logits is not None and not same_bits(reference.logits, found.logits):
        note = "every module agrees at this row, but other logits were handed on"
    elif apart := _thought_apart(reference, found):
        note = f"every module agrees at this row, but {apart}: it arises in T, or in the rows that T was given"
    else:
        note = "every module agrees at this row: the difference arises in choosing, committing or writing tokens"
    return Origin(row=found.row, rows=rows, note=note)


def _thought_apart(reference: Recorded, found: Recorded) -> str:
    """Name the first chunk, up to the row's own, whose thoughts differ; "" if there is none."""
    for i, (ours, theirs) in enumerate(zip_longest(reference.thoughts, found.thoughts)):
        if ours != theirs:
            return f"the chunk at position {i * found.chunk} thought {theirs}, in the reference {ours}"
    return ""


def _distance(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Return the largest distance of two arrays in representable numbers, and how many elements differ."""
    ours, theirs = _ordinals(a), _ordinals(b)
    apart = np.abs(ours - theirs)
    return int(apart.max()), int((apart > 0).sum())


def _ordinals(x: np.ndarray) -> np.ndarray:
    """Return the rank of each number among those of its type, int64."""
    raw = bits(x).astype(np.int64)
    found: np.ndarray = np.where(raw < 0, -(raw & ((1 << (8 * x.itemsize - 1)) - 1)), raw)
    return found
