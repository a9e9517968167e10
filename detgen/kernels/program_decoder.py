"""The common part of decoders that run programs of steps, on whatever back end.

A model drafts for itself with a second copy of the weights of its linear layers, in fewer bits. What a pass computes
with them is never committed without being verified, so its bits are part of no promise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import Form, bytes_of, quantized
from detgen.kernels.decoder import Decoder, KVBuffers, Narrowed
from detgen.kernels.exchange import Exchange
from detgen.program import steps
from detgen.program.arrays import Array, beside, each
from detgen.program.experts import ExpertLinear
from detgen.program.operands import GROUP, Buffer, Step, Weight, address
from detgen.program.program import Program
from detgen.program.rows import NOT_A_NUMBER, Rows, Take
from detgen.program.storage import FORMATS

_Linear = steps.Linear | steps.HeadLinear | steps.ScoredLinear | ExpertLinear


class Programs(Protocol):
    """The programs of a model.

    Attributes:
        kind: class name of the model.
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
        group: the most query heads that share a key head.
    """

    kind: str
    outputs: int
    group: int

    def over(self, cache: KVBuffers) -> Programs:
        """Return the same model over another cache."""
        ...

    @property
    def width(self) -> int:
        """Entries of a hidden state."""
        ...

    @property
    def states(self) -> Buffer:
        """The buffer of what is added to the hidden states."""
        ...

    @property
    def extracted(self) -> Buffer:
        """Takes hidden states that are wanted."""
        ...

    def out(self, scored: bool) -> Buffer:
        """Takes the output of the wanted rows, or their scores."""
        ...

    @property
    def slots(self) -> int:
        """Number of slots with room for states; programs built for fewer refer to another place."""
        ...

    def reach(self, positions: int) -> int:
        """Make angles for that many positions; return for how many there are. Programs built before keep theirs."""
        ...

    def program(self, inject: int = -1, extract: int = -1, scored: bool = False) -> Program:
        """Return the steps of passes, with or without an exchange at these layers, for logits or their scores."""
        ...


class ProgramDecoder(ABC):
    """A decoder that runs programs.

    Args:
        programs: programs of the model.
        fewer: copies that linear layers read instead of their weights; None for none.

    Attributes:
        kind: class name of the model.
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
    """

    def __init__(self, programs: Programs, fewer: FewerBits | None = None) -> None:
        self._programs, self._fewer, self._reached = programs, fewer, (0, 0, False)
        self.kind, self.outputs = programs.kind, programs.outputs
        self._broken: int | None = None
        self._take: Take | None = None
        self._exact = False

    def program(self, inject: int = -1, extract: int = -1, scored: bool = False) -> Program:
        """Return the steps of passes; see `Programs`."""
        made = self._programs.program(inject, extract, scored)
        return made if self._fewer is None else self._fewer.of(made)

    def narrowed(self) -> Narrowed | None:
        """See `Decoder`."""
        own, copies, reads = sizes(self._programs.program())
        if not copies:
            return None
        fewer = FewerBits()
        return Narrowed(self._again(fewer), lambda: fewer.improve(self._programs.program()), reads / own, copies)

    @abstractmethod
    def _again(self, fewer: FewerBits) -> Decoder:
        """Return the same decoder with linear layers that read copies."""

    def _outgrown(self, positions: int) -> bool:
        """Make angles for that many positions; return whether programs built before are outdated."""
        before, improved = self._reached, self._fewer is not None and self._fewer.improved
        self._reached = self._programs.reach(positions), self._programs.slots, improved
        return before != self._reached

    @contextmanager
    def telling(self, take: Callable[[str, object], None]) -> Iterator[None]:
        """See `Decoder`."""
        self._take = take
        try:
            yield
        finally:
            self._take = None

    @contextmanager
    def breaking(self, token: int) -> Iterator[None]:
        """See `Decoder`."""
        self._broken = token
        try:
            yield
        finally:
            self._broken = None

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """See `Decoder`."""
        self._exact = True
        try:
            yield
        finally:
            self._exact = False

    def explain_difference(self) -> str:
        """See `Decoder`."""
        return ""

    def _with_broken(self, rows: Rows) -> Rows:
        """Return the rows, with the broken token (if any) replaced by NaN."""
        if self._broken is None:
            return rows
        if isinstance(ids := rows.ids, np.ndarray):
            return rows._replace(ids=np.where(ids == self._broken, NOT_A_NUMBER, ids))
        return rows._replace(ids=ids.masked_fill(ids == self._broken, NOT_A_NUMBER))

    def _exchanged(self, exchange: Exchange | None, rows: int) -> dict[Buffer, Array]:
        """Return the buffers of an exchange for a pass of `rows` rows; rows beyond its own are padding."""
        if exchange is None:
            return {}
        programs, count = self._programs, len(exchange.states)
        states = exchange.states
        if rows > count:
            states = states.new_zeros(rows, programs.width)
            states[:count] = exchange.states
        given: dict[Buffer, Array] = {programs.states: states}
        if exchange.extract >= 0:
            given[programs.extracted] = taken = states.new_empty(rows, programs.width)
            exchange.hidden = taken[:count]
        return given


class FewerBits:
    """Copies of weights in fewer bits, each made when first needed; `improved` tells whether they are the better ones.

    A weight with numbers that have no scale in float16 stays as it is: drafts are no reason to end a run.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Weight, Weight]] = {}  # by its place in memory, a weight and its copy
        self.improved = False

    def of(self, program: Program) -> Program:
        """Let linear layers of a program read copies where weights take more bits, in place; return it."""
        for i, step, form in _linear(program, improved=self.improved):
            if form is not None:
                program.steps[i] = self._step(step, form)
        return program

    def improve(self, program: Program) -> bool:
        """Drop the copies for better ones; return False if there are no better ones, or they are in use already."""
        now, then = ([form for *_, form in _linear(program, improved=improved)] for improved in (self.improved, True))
        if now == then:
            return False
        self.improved = True
        self._made.clear()
        return True

    def _step(self, step: _Linear, form: Form) -> Step:
        weight = step.weight
        key = address(weight.data)
        if key not in self._made:
            try:
                made = each(quantized(weight, form), lambda x: beside(x, weight.data))
                self._made[key] = weight, made
            except EngineError:
                self._made[key] = weight, weight
        return replace(step, weight=replace(self._made[key][1], bias=weight.bias))


def form_of(weight: Weight, *, last: bool, improved: bool = False) -> Form | None:
    """Return the form of a weight's copy; None if it is not copied.

    A copy in 4 bits gains most if the model's choices stay the same. Output layers get 8: in 4 they choose other tokens
    far more often (65 % of the drafts of SmolLM2-135M were accepted instead of 86). Improved copies of weights in 32
    bits have 8, too; copies of weights in 16 bits need 4 to be worth their time, and no copy of weights in 8 bits is: a
    pass of one row takes 0.6 to 0.8 times as long in 4.

    Args:
        weight: weight of a linear layer.
        last: whether it is the output layer.
        improved: whether copies in 4 bits turned out to choose other tokens too often.
    """
    bits = FORMATS[weight.storage].bits
    if weight.inputs % GROUP or bits <= 8:
        return None
    return "q8" if last or (improved and bits > 16) else "q4_k"


def sizes(program: Program) -> tuple[int, int, int]:
    """Return the bytes of linear layers, of their improved copies, and of what passes with the first copies read."""
    own, copies, reads = {}, {}, {}
    for improved in (True, False):
        for _, step, form in _linear(program, improved=improved):
            weight = step.weight
            key = address(weight.data)
            own[key] = reads[key] = weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
            if form is not None:
                reads[key] = bytes_of(math.prod(weight.data.shape[:-2]), weight.inputs, form)
                if improved:
                    copies[key] = reads[key]
    return sum(own.values()), sum(copies.values()), sum(reads.values())


def _linear(program: Program, *, improved: bool) -> Iterator[tuple[int, _Linear, Form | None]]:
    """Yield the places of a program's linear layers, the layers and the forms of their copies."""
    found = [(i, step) for i, step in enumerate(program.steps) if isinstance(step, _Linear)]
    for i, step in found:
        yield i, step, form_of(step.weight, last=i == found[-1][0], improved=improved)
