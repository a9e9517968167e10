"""The steps of a mixture of experts: a row is routed to some of them, sorted to its experts, and combined again.

setup.py reads this module: it imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from detgen.program.operands import MOST_PICKS, Activation, Buffer, Into, Step, Weight, of_linear, wide


@dataclass(frozen=True, kw_only=True, eq=False)
class Route(Step):
    """Which experts of a mixture a row takes: the most probable ones.

    Attributes:
        x: logits of the experts, which become probabilities.
        to: takes a row's routes, pairs of an expert's number and its weight, in order of the numbers.
        normalized: whether the weights are made to add up to 1.
    """

    x: Buffer
    to: Buffer
    normalized: bool

    def _faults(self) -> Iterator[str]:
        picks = self.to.width // 2
        if self.to.width % 2 or not 1 <= picks <= min(self.x.width, MOST_PICKS):
            yield f"{self.to} holds no routes to some of {self.x.width} experts, {MOST_PICKS} at most"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sort(Step):
    """Lists the rows of each expert, for the steps behind it.

    Attributes:
        routes: what `Route` wrote.
        experts: how many there are.
    """

    _written = "routes"
    routes: Buffer
    experts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLinear(Step):
    """A linear layer of each expert, for the rows that `Sort` listed.

    Attributes:
        x: rows of inputs, or of a segment of inputs for each of the row's routes.
        routes: what was sorted.
        to: takes a segment of results for each route.
        weight: of all experts, one behind the other.
        activation: of the results, or of the gates.
        gated: whether half of the columns, activated, are factors of the others.
    """

    x: Buffer
    routes: Buffer
    to: Buffer
    weight: Weight
    activation: Activation = Activation.NONE
    gated: bool = False

    def _faults(self) -> Iterator[str]:
        picks = self.routes.width // 2
        yield from self.weight.faults(self.weight.data.shape[0], gated=self.gated)
        if self.weight.bias is not None:
            yield "experts have no bias"
        if self.x.width != self.weight.inputs:
            yield from wide(self.x, picks * self.weight.inputs)
        yield from wide(self.to, picks * self.weight.outputs)
        yield from of_linear(self.activation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Combine(Step):
    """The sum of what a row's experts gave, times their weights, in order of their numbers.

    Attributes:
        x: a segment for each route.
        routes: with the weights.
        to: takes the sums.
    """

    x: Buffer
    routes: Buffer
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from wide(self.x, self.routes.width // 2 * self.to.buffer.width)
