"""What decoders that run programs of steps share, whoever runs these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from detgen.kernels.decoder import Decoder, KVBuffers, Narrowed
from detgen.kernels.exchange import Exchange
from detgen.kernels.fewer_bits import FewerBits, sizes
from detgen.program.arrays import Array
from detgen.program.operands import Buffer
from detgen.program.program import Program
from detgen.program.rows import NOT_A_NUMBER, Rows, Take


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
        """The same model over another cache."""
        ...

    @property
    def width(self) -> int:
        """Entries of a hidden state."""
        ...

    @property
    def states(self) -> Buffer:
        """Takes what is added to the hidden states."""
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
        """Slots whose states there is room for; programs that were built for fewer know another place of them."""
        ...

    def reach(self, positions: int) -> int:
        """Have angles of that many positions; how many there are now. Programs have those of when they are built."""
        ...

    def program(self, inject: int = -1, extract: int = -1, scored: bool = False) -> Program:
        """The steps of passes, with or without an exchange at these layers, for logits or their scores."""
        ...


class ProgramDecoder(ABC):
    """A decoder that is a program.

    Args:
        programs: of the model.
        fewer: what linear layers read instead of their weights; None for nothing else.

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
        """The steps of passes, see `Programs`."""
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
        """The same decoder, with something else that linear layers read."""

    def _outgrown(self, positions: int) -> bool:
        """Have angles of that many positions; whether programs that were built before have fewer, or older parts."""
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
        """The rows, where a token is broken."""
        if self._broken is None:
            return rows
        if isinstance(ids := rows.ids, np.ndarray):
            return rows._replace(ids=np.where(ids == self._broken, NOT_A_NUMBER, ids))
        return rows._replace(ids=ids.masked_fill(ids == self._broken, NOT_A_NUMBER))

    def _exchanged(self, exchange: Exchange | None, rows: int) -> dict[Buffer, Array]:
        """The buffers of an exchange in a pass of so many rows; those behind its own are padding."""
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
