"""The steps of a mixture of experts: rows are routed to some of them, sorted by expert, and combined again.

setup.py reads this module: it imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from detgen.program.operands import (
    MOST_EXPERTS,
    MOST_PICKS,
    Activation,
    Buffer,
    Floats,
    Into,
    Scoring,
    Step,
    Weight,
    of_linear,
    shaped,
    wide,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Route(Step):
    """Choose the experts of each row: those with the largest scores.

    Attributes:
        x: logits of the experts, which become scores; with `OVER_PICKS`, not yet divided by their sum.
        to: takes a row's routes: pairs of expert number and weight, ordered by number.
        normalized: whether the weights (the scores) are scaled to add up to 1.
        scoring: how logits become scores.
        correction: [experts], added to the scores when experts are chosen, but not to their weights; None for none.
        groups: groups of consecutive experts; only experts in the best groups are taken. 1 for no groups.
        best_groups: number of groups that experts are taken from.
        of_group: how many of a group's largest scores are added up to rank it, 1 or 2.
        factor: multiplies the weights.
        factors: [experts], multiply the weights of each expert after that; None for none.
        added: added to the sum of sigmoids that weights are divided by.
        spread: for `SPARSE`, how far below the largest logit others count, as a share of that logit, or of their own
            magnitude where it is larger.
    """

    x: Buffer
    to: Buffer
    normalized: bool
    scoring: Scoring = Scoring.OVER_ALL
    correction: Floats | None = None
    groups: int = 1
    best_groups: int = 1
    of_group: int = 1
    factor: float = 1.0
    factors: Floats | None = None
    added: float = 1e-20
    spread: float = 0.0

    def _faults(self) -> Iterator[str]:
        picks = self.to.width // 2
        if self.to.width % 2 or not 1 <= picks <= min(self.x.width, MOST_PICKS):
            yield f"{picks} of {self.x.width} experts, where 1 to {MOST_PICKS} can be taken"
        yield from shaped("correction", self.correction, (self.x.width,))
        yield from shaped("factors", self.factors, (self.x.width,))
        if self.x.width > MOST_EXPERTS:
            yield f"more than {MOST_EXPERTS} experts"
        if self.scoring == Scoring.OVER_PICKS and not self.normalized:
            yield "weights of the experts that are taken, not normalized"
        if self.scoring == Scoring.SPARSE and (self.normalized or self.groups > 1 or self.correction is not None):
            yield "sparse mixing of weights that are normalized, in groups, or corrected"
        if not 1 <= self.best_groups <= self.groups or self.of_group not in (1, 2) or self.x.width % self.groups:
            yield f"{self.best_groups} of {self.groups} groups by {self.of_group} of {self.x.width} experts"
        elif self.x.width // self.groups * self.best_groups < picks or self.x.width // self.groups < self.of_group:
            yield f"groups of {self.x.width // self.groups} experts, which are too small for {picks} of them"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sort(Step):
    """List the rows of each expert, for the steps that follow.

    Attributes:
        routes: what `Route` wrote.
        experts: number of experts.
    """

    _written = "routes"
    routes: Buffer
    experts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Weigh(Step):
    """Copy a row once for each of its routes, multiplied by the route's weight.

    Attributes:
        x: is read.
        routes: with the weights.
        to: takes a segment for each route.
    """

    x: Buffer
    routes: Buffer
    to: Buffer

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to, self.routes.width // 2 * self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLinear(Step):
    """A linear layer of each expert, for the rows that `Sort` listed.

    Attributes:
        x: rows of inputs, or of a segment of inputs for each of the row's routes.
        routes: what `Sort` read.
        to: takes a segment of results for each route.
        weight: of all experts, one after another.
        activation: applied to the results, or to the gates.
        gated: whether half of the columns, once activated, multiply the others.
        limit: what gates are at most, and what they open in magnitude; 0 for none. Gates are then activated by
            gate * sigmoid(slope * gate), whatever the activation is, and `shift` is added to what they open.
        slope: see `limit`.
        shift: see `limit`.
    """

    x: Buffer
    routes: Buffer
    to: Buffer
    weight: Weight
    activation: Activation = Activation.NONE
    gated: bool = False
    limit: float = 0.0
    slope: float = 1.0
    shift: float = 0.0

    def _faults(self) -> Iterator[str]:
        picks = self.routes.width // 2
        yield from self.weight.faults(self.weight.data.shape[0], gated=self.gated)
        if self.limit and not self.gated:
            yield "a limit without gates"
        if self.x.width != self.weight.inputs:
            yield from wide(self.x, picks * self.weight.inputs)
        yield from wide(self.to, picks * self.weight.outputs)
        yield from of_linear(self.activation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Combine(Step):
    """Add up the results of a row's experts, times their weights, ordered by expert number.

    Attributes:
        x: a segment for each route.
        routes: with the weights.
        to: takes the sums.
        weighed: whether to apply the weights; False where they were applied to the inputs.
    """

    x: Buffer
    routes: Buffer
    to: Into
    weighed: bool = True

    def _faults(self) -> Iterator[str]:
        yield from wide(self.x, self.routes.width // 2 * self.to.buffer.width)
