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

_POSITIONS = 2048  # for which angles are worked out at first

# Gives what steps read instead of an array that was made for them: where its numbers are kept.
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
        values: likewise.
        states: None for a layer that keeps none.
    """

    keys: Array
    values: Array
    states: LayerStates | None


class NormParts(NamedTuple):
    """A norm, as its step takes it; see `steps.Norm`."""

    vectors: int
    size: int
    weight: Array
    bias: Array | None
    epsilon: float
    centred: bool

    @classmethod
    def of(cls, norm: Norm, keep: Keep, entries: int | None = None) -> NormParts:
        """A norm of a row with that many entries, of each head if it is one of heads; without a number, of a row."""
        weight = keep(np.ascontiguousarray(norm.weight))
        bias = None if norm.bias is None else keep(np.ascontiguousarray(norm.bias))
        size = weight.shape[-1]
        return cls(1 if entries is None else entries // size, size, weight, bias, norm.epsilon, norm.centred)

    def step(self, name: str, x: Buffer, to: Into, *, at: int = 0, wanted: bool = False) -> steps.Norm:
        """The step."""
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
        """Takes results that go through something else first."""
        return Buffer("branch", self.into.buffer.width)

    def add(self, program: Program, name: str, weight: Weight, x: Buffer) -> None:
        """Append the linear layer that gives the results."""
        to = self.into if self.norm is None else Into(self.before)
        program.add(steps.Linear(name=name, wanted=self.wanted, x=x, to=to, weight=weight))
        if self.norm is not None:
            program.add(self.norm.step(f"{name}, normed", self.before, self.into, wanted=self.wanted))


def joint(linears: list[Linear], form: Form, keep: Keep, *, gated: bool = False) -> Weight:
    """Linear layers that read the same input, as one: behind each other, or a gate and what it opens in pairs.

    The form is as in `panels`.
    """
    weights, biases = [one.weight for one in linears], [one.bias for one in linears if one.bias is not None]
    return kept(joined(weights, biases, form, gated=gated), keep)


def side_by_side(linears: list[Linear], form: Form, keep: Keep) -> list[tuple[int, Weight, float]]:
    """Linear layers that read the same input and write one row; where the results of each begin there, and its factor.

    Those that follow each other and are stored in the same way are one; for `form` see `joint`.
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
    """Takes the wanted rows of a buffer."""
    return Buffer(f"wanted {x.name}", x.width)


def taken(program: Program, name: str, x: Buffer) -> Buffer:
    """Append what takes the wanted rows."""
    to = wanted_of(x)
    program.add(steps.Take(name=name, x=x, to=to))
    return to
