"""The steps of layers that keep a state of each sequence: a short convolution, a delta rule, state spaces.

A stored state belongs to a position: it is what the tokens before that position leave. The rows of a pass are computed
from it, and only certain rows advance it. What the others would add is kept in a ring of positions, for the pass that
knows which of them were right. So rolling back copies nothing: the next pass begins at another position. `Rows.spans`
says what a pass is told about each sequence.

setup.py reads this module: it imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from detgen.program.operands import Activation, Buffer, Entries, Floats, Step, of_linear, shaped, wide


@dataclass(frozen=True, kw_only=True, eq=False)
class Convolve(Step):
    """A convolution of each channel over a row and the rows before it in its sequence.

    Attributes:
        x: is read.
        to: takes the results; another buffer.
        weight: [taps, channels]; the tap for the row itself comes last.
        bias: [channels]; None for none.
        activation: of the results.
        taps: number of rows that enter a result, at least 1.
        ring: positions of a sequence that are kept, at least `taps` and the rows of a span that are not certain.
        kept: [slots, ring, channels], rows of x by position modulo `ring`.
    """

    x: Buffer
    to: Buffer
    weight: Floats
    bias: Floats | None = None
    activation: Activation = Activation.NONE
    taps: int
    ring: int
    kept: Entries

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to, self.x.width)
        yield from of_linear(self.activation)
        yield from shaped("weight", self.weight, (self.taps, self.x.width))
        yield from shaped("bias", self.bias, (self.x.width,))
        yield from shaped("kept", self.kept, (None, self.ring, self.x.width))
        if not 1 <= self.taps <= self.ring:
            yield f"{self.taps} taps, of a ring of {self.ring} positions"
        if self.x == self.to:
            yield f"writes {self.to} while later rows read it"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence(Step):
    """What a delta rule and a state space share: states of keys by values, which rows advance in order.

    Attributes:
        qkv: queries and keys, [key_heads, size] each, and values, [heads, values], one after the other.
        decay: [heads]; softplus(decay + bias) is a row's step; times rates, the logarithm of what is left of a state.
        to: takes the results, [heads, values] of a row.
        rates: [heads], not above 0.
        bias: [heads].
        heads: number of states of a layer; consecutive ones share a key.
        key_heads: number of queries and of keys.
        size: entries of a key.
        values: entries of a value.
        ring: positions of a sequence whose inputs are kept: at least those from its state to the last row of a span
            with rows that are not certain, and those from its state to the first row of any.
        state: [slots, heads, size, values].
        kept: [slots, ring, key_heads * size + heads * values + 2 * heads]: keys, values, decays and strengths of rows
            that were not certain, by position modulo `ring`.
    """

    qkv: Buffer
    decay: Buffer
    to: Buffer
    rates: Floats
    bias: Floats
    heads: int
    key_heads: int
    size: int
    values: int
    ring: int
    state: Entries
    kept: Entries

    def _faults(self) -> Iterator[str]:
        if self.key_heads < 1 or self.heads % self.key_heads:
            yield f"{self.heads} heads cannot share {self.key_heads} keys"
        keys, values = self.key_heads * self.size, self.heads * self.values
        yield from wide(self.qkv, 2 * keys + values)
        yield from wide(self.decay, self.heads)
        yield from wide(self.to, values)
        yield from shaped("rates", self.rates, (self.heads,))
        yield from shaped("bias", self.bias, (self.heads,))
        yield from shaped("state", self.state, (None, self.heads, self.size, self.values))
        yield from shaped("kept", self.kept, (None, self.ring, keys + values + 2 * self.heads))


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaRule(Recurrence):
    """The gated delta rule (Yang et al., arXiv 2412.06464), one row after the other.

    Attributes:
        strength: [heads]; its sigmoid is the share of a correction that is made.
    """

    strength: Buffer

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from wide(self.strength, self.heads)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateSpace(Recurrence):
    """The state space of Mamba-2 (Dao and Gu, arXiv 2405.21060), one row after the other; its strengths are its steps.

    Attributes:
        skip: [heads]; values times it are added to the results.
        least: lower bound of a step.
        most: upper bound of a step; inf for none.
    """

    skip: Floats
    least: float = 0.0
    most: float = math.inf

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from shaped("skip", self.skip, (self.heads,))


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectiveScan(Step):
    """The selective state space of the first Mamba (Gu and Dao, arXiv 2312.00752), one row after the other.

    Attributes:
        x: values, [values].
        times: [values]; softplus(times + bias) is a row's step of each value; times rates, the logarithms of what is
            left of the entries behind it.
        kq: keys and queries, [size] each, one after the other.
        to: takes the results, [values] of a row.
        rates: [size, values], not above 0.
        bias: [values].
        skip: [values]; values times it are added to the results.
        size: entries of a key.
        values: entries of a value.
        ring: see `Recurrence`.
        state: [slots, 1, size, values].
        kept: [slots, ring, size + 2 * values]: keys, values and steps of rows that were not certain, by position modulo
            `ring`.
    """

    x: Buffer
    times: Buffer
    kq: Buffer
    to: Buffer
    rates: Floats
    bias: Floats
    skip: Floats
    size: int
    values: int
    ring: int
    state: Entries
    kept: Entries

    def _faults(self) -> Iterator[str]:
        yield from wide(self.x, self.values)
        yield from wide(self.times, self.values)
        yield from wide(self.kq, 2 * self.size)
        yield from wide(self.to, self.values)
        yield from shaped("rates", self.rates, (self.size, self.values))
        yield from shaped("bias", self.bias, (self.values,))
        yield from shaped("skip", self.skip, (self.values,))
        yield from shaped("state", self.state, (None, 1, self.size, self.values))
        yield from shaped("kept", self.kept, (None, self.ring, self.size + 2 * self.values))


@dataclass(frozen=True, kw_only=True, eq=False)
class Watch(Step):
    """Note rows that are not finite, where the last layer has no keys that would show it.

    Attributes:
        x: is read, not changed.
    """

    _written = "x"
    x: Buffer

    def _faults(self) -> Iterator[str]:
        if self.wanted:
            yield "watches the wanted rows alone"


STATEFUL = (Convolve, DeltaRule, StateSpace, SelectiveScan, Watch)
