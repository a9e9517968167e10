"""Building blocks of the steps of layers: linear layers side by side, norms, angles."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from detgen.kernels.c.angles import turns
from detgen.kernels.c.panels import joined
from detgen.kernels.c.quantizing import Form, kind
from detgen.kernels.decoder import LayerStates
from detgen.models.parts import Linear, Norm
from detgen.models.rotary import Rotary, Tuning
from detgen.program import steps
from detgen.program.arrays import Array, each
from detgen.program.operands import Buffer, Into, Weight
from detgen.program.program import Program

_POSITIONS = 2048  # number of positions whose angles are computed at first

# Returns the array that steps read, given one made for them: where its numbers are kept.
Keep: TypeAlias = Callable[[np.ndarray], Array]


def as_it_is(x: np.ndarray) -> Array:
    """Return an array unchanged: keep it where it was made."""
    return x


class Angles:
    """Cosines and sines of positions so far, by rotary embedding, and factors of queries, by tuning."""

    def __init__(self, keep: Keep) -> None:
        self.positions = 0
        self._keep = keep
        self._tables: dict[tuple[bytes, float], tuple[Array, Array]] = {}
        self._factors: dict[Tuning, Array] = {}

    def reach(self, positions: int) -> None:
        """Make room for that many positions, and some more."""
        self.positions = max(_POSITIONS, 1 << (positions - 1).bit_length())
        self._tables.clear()
        self._factors.clear()

    def of(self, rotary: Rotary) -> tuple[Array, Array]:
        """Return cosines and sines, [positions, angles] each."""
        key = rotary.frequencies.tobytes(), rotary.amplitude
        if key not in self._tables:
            cosines, sines = turns(rotary.frequencies, rotary.amplitude, 0, self.positions)
            self._tables[key] = self._keep(cosines), self._keep(sines)
        return self._tables[key]

    def factors(self, tuning: Tuning) -> Array:
        """Return the factors of queries, [positions]."""
        if tuning not in self._factors:
            self._factors[tuning] = self._keep(tuning.factors(self.positions))
        return self._factors[tuning]


class Entries(NamedTuple):
    """Where a layer keeps keys, values and states of sequences.

    Attributes:
        keys: see `Cache`.
        values: see `Cache`.
        states: states of the layer; None if it keeps none.
    """

    keys: Array
    values: Array
    states: LayerStates | None


class NormParts(NamedTuple):
    """The arguments of a norm's step; see `steps.Norm`."""

    vectors: int
    size: int
    weight: Array
    bias: Array | None
    epsilon: float
    centred: bool

    @classmethod
    def of(cls, norm: Norm, keep: Keep, entries: int | None = None) -> NormParts:
        """Take a norm of rows of `entries` entries, per head if it is one of heads; None: of whole rows."""
        weight = keep(np.ascontiguousarray(norm.weight))
        bias = None if norm.bias is None else keep(np.ascontiguousarray(norm.bias))
        size = weight.shape[-1]
        return cls(1 if entries is None else entries // size, size, weight, bias, norm.epsilon, norm.centred)

    def step(self, name: str, x: Buffer, to: Into, *, at: int = 0, wanted: bool = False) -> steps.Norm:
        """Return the norm's step."""
        return steps.Norm(name=name, wanted=wanted, x=x, to=to, at=at, own=self.weight.ndim == 2, **self._asdict())


class Branch(NamedTuple):
    """Where the results of an attention or a feed-forward go.

    Attributes:
        into: takes the results.
        norm: norm applied to them first; None for none.
        wanted: whether they are of the wanted rows only.
    """

    into: Into
    norm: NormParts | None
    wanted: bool

    @property
    def before(self) -> Buffer:
        """Buffer for results that go through something else first."""
        return Buffer("branch", self.into.buffer.width)

    def add(self, program: Program, name: str, weight: Weight, x: Buffer) -> None:
        """Append the linear layer that gives the results."""
        to = self.into if self.norm is None else Into(self.before)
        program.add(steps.Linear(name=name, wanted=self.wanted, x=x, to=to, weight=weight))
        if self.norm is not None:
            program.add(self.norm.step(f"{name}, normed", self.before, self.into, wanted=self.wanted))


def joint(linears: list[Linear], form: Form, keep: Keep, *, gated: bool = False) -> Weight:
    """Join linear layers that read the same input: one after the other, or a gate and what it opens in pairs.

    The form is as in `panels`.
    """
    weights, biases = [one.weight for one in linears], [one.bias for one in linears if one.bias is not None]
    return kept(joined(weights, biases, form, gated=gated), keep)


def side_by_side(linears: list[Linear], form: Form, keep: Keep) -> list[tuple[int, Weight, float]]:
    """Join linear layers that read the same input and write one row; return each with its first entry and its factor.

    Adjacent layers that are stored in the same way become one; for `form` see `joint`.
    """
    found, at = [], 0
    for (_, factor), some in groupby(linears, lambda one: (kind(one.weight), one.factor)):
        weight = joint(list(some), form, keep)
        found.append((at, weight, factor))
        at += weight.outputs
    return found


def kept(weight: Weight, keep: Keep) -> Weight:
    """Return the weight with its arrays where they are kept."""
    found: Weight = each(weight, keep)
    return found


def wanted_of(x: Buffer) -> Buffer:
    """Return the buffer for the wanted rows of a buffer."""
    return Buffer(f"wanted {x.name}", x.width)


def taken(program: Program, name: str, x: Buffer) -> Buffer:
    """Append the step that takes the wanted rows; return their buffer."""
    to = wanted_of(x)
    program.add(steps.Take(name=name, x=x, to=to))
    return to
