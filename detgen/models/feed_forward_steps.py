"""Builds the steps of a feed-forward, of a mixture of experts, and of both in parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from detgen.kernels.c.panels import halves, stacked
from detgen.kernels.c.quantizing import MADE, Form, Quantized, rows_of
from detgen.models.parts import Beside, Experts, FeedForward
from detgen.models.step_parts import Branch, Keep, NormParts, joint, kept
from detgen.program import steps
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import PANEL, Activation, Buffer, Into, Step
from detgen.program.program import Program


class FeedForwardSteps:
    """Builds the steps of a feed-forward."""

    def __init__(self, mlp: FeedForward, form: Form, keep: Keep) -> None:
        # A gate with a factor or with a cut-off is a layer of its own.
        apart = mlp.gated and (mlp.up[0].factor != 1 or mlp.deviations is not None)
        self._gate = (joint(mlp.up[:1], form, keep), mlp.up[0].factor) if apart else None
        self._up = joint(mlp.up[apart:], form, keep, gated=mlp.gated and not apart)
        self._activation, self._gated, self._deviations = mlp.activation, mlp.gated, mlp.deviations
        self._bend = mlp.bend
        self.down, self._factor = joint([mlp.down], form, keep), mlp.down.factor
        self.activated = Buffer("activated", self.down.inputs)

    def open(self, program: Program, name: str, read: Buffer, *, wanted: bool) -> None:
        """Append the steps that read the layer's rows."""
        apart, activated = self._gate is not None, self.activated
        program.add(
            steps.Linear(
                name=f"{name}.up_proj",
                wanted=wanted,
                x=read,
                to=Into(activated),
                weight=self._up,
                activation=Activation.NONE if apart else self._activation,
                gated=self._gated and not apart,
            )
        )
        if self._bend is not None:
            bent: dict[str, Any] = {"x": activated, "to": activated, "wanted": wanted, **self._bend}
            program.add(steps.Xielu(name=f"{name}, activated", **bent))
        if self._gate is not None:
            (weight, factor), gates = self._gate, Buffer("gates of the mlp", activated.width)
            into = Into(gates, factor=factor)
            program.add(steps.Linear(name=f"{name}.gate_proj", wanted=wanted, x=read, to=into, weight=weight))
            if self._deviations is not None:
                few: dict[str, Any] = {"deviations": self._deviations, "wanted": wanted}
                program.add(steps.GaussianTopK(name=f"{name}, gates kept", x=gates, to=gates, **few))
            how: dict[str, Any] = {"gates": gates, "function": self._activation, "wanted": wanted}
            program.add(steps.Gate(name=f"{name}, gated", x=activated, to=Into(activated), **how))

    def close(self, program: Program, name: str, branch: Branch) -> None:
        """Append the steps that add to them."""
        into = replace(branch.into, factor=branch.into.factor * self._factor)
        branch._replace(into=into).add(program, f"{name}.down_proj", self.down, self.activated)


class ExpertSteps:
    """Builds the steps of a mixture of experts."""

    def __init__(self, mlp: Experts, form: Form, keep: Keep) -> None:
        experts, width, inner = mlp.down.shape  # if experts read short vectors, the width is theirs
        self._experts = int(experts)
        self._activation, self._limited, self._factor = mlp.activation, mlp.limited, mlp.factor
        self._routing: dict[str, Any] = {
            name: keep(x) if isinstance(x, np.ndarray) else x for name, x in mlp.routing.items()
        }
        plain: Form = form if form not in MADE else "none"  # never in few bits
        self._router = joint([mlp.router], plain, keep)
        self._gated = mlp.gated
        gates: Callable[[Any], list[Any]] = _turns if mlp.interleaved else halves if mlp.gated else _one
        biases: tuple[Any, Any] = (
            ([], []) if mlp.biases is None else ([gates(b) for b in mlp.biases[0]], [[b] for b in mlp.biases[1]])
        )
        panel = PANEL // 2 if mlp.gated else PANEL
        self._up = kept(stacked([gates(weight) for weight in _each(mlp.up)], panel, form, biases[0]), keep)
        self._down = kept(stacked([[weight] for weight in _each(mlp.down)], PANEL, form, biases[1]), keep)
        self._weighed = Buffer("experts weighed", mlp.picks * width) if mlp.weighs_inputs else None
        self._logits, self._routes = Buffer("router", self._experts), Buffer("routes", 2 * mlp.picks)
        self._activated, self._each = (
            Buffer("experts activated", mlp.picks * inner),
            Buffer("experts", mlp.picks * width),
        )
        self._short = None if mlp.short is None else [joint([linear], form, keep) for linear in mlp.short]
        self._routed = None if mlp.routed is None else NormParts.of(mlp.routed, keep)
        self._shared = None
        if mlp.shared is not None:
            shared, gate = mlp.shared
            self._shared = FeedForwardSteps(shared, form, keep), None if gate is None else joint([gate], plain, keep)
        self._gate = Buffer("shared gate", 1)

    def open(self, program: Program, name: str, read: Buffer, *, wanted: bool, hidden: Buffer | None = None) -> None:
        """Append the steps that read the layer's rows; a router with its own norm reads them before they are normed."""
        told = read
        if self._routed is not None:
            assert hidden is not None, "what it norms is there"
            told = Buffer("router read", read.width)
            program.add(self._routed.step(f"{name}.norm of the router", hidden, Into(told), wanted=wanted))
        logits, routes, weighed, x = self._logits, self._routes, self._weighed, read
        if self._short is not None:
            x = Buffer("short for experts", self._short[0].outputs)
            program.add(
                steps.Linear(name=f"{name}.shortened", wanted=wanted, x=read, to=Into(x), weight=self._short[0])
            )
        weighing: list[Step] = []
        if weighed is not None:
            weighing = [Weigh(name=f"{name}.weighed", wanted=wanted, x=x, routes=routes, to=weighed)]
        for step in (
            steps.Linear(name=f"{name}.gate", wanted=wanted, x=told, to=Into(logits), weight=self._router),
            Route(name=f"{name}.routes", wanted=wanted, x=logits, to=routes, **self._routing),
            Sort(name=f"{name}.rows of experts", wanted=wanted, routes=routes, experts=self._experts),
            *weighing,
            ExpertLinear(
                name=f"{name}.experts.up_proj",
                wanted=wanted,
                x=x if weighed is None else weighed,
                routes=routes,
                to=self._activated,
                weight=self._up,
                activation=self._activation,
                gated=self._gated,
                **dict(zip(("limit", "slope", "shift"), self._limited, strict=True)),
            ),
            ExpertLinear(
                name=f"{name}.experts.down_proj",
                wanted=wanted,
                x=self._activated,
                routes=routes,
                to=self._each,
                weight=self._down,
            ),
        ):
            program.add(step)
        if self._shared is not None:
            shared, gate = self._shared
            name = f"{name}.shared_expert"
            if gate is not None:
                program.add(steps.Linear(name=f"{name}_gate", wanted=wanted, x=read, to=Into(self._gate), weight=gate))
            shared.open(program, name, read, wanted=wanted)

    def close(self, program: Program, name: str, branch: Branch) -> None:
        """Append the steps that add to them."""
        wanted, into = branch.wanted, replace(branch.into, factor=branch.into.factor * self._factor)
        if branch.norm is not None:
            mixed = Buffer("mixed", into.buffer.width)
            self.close(program, name, Branch(Into(mixed), None, wanted))
            program.add(branch.norm.step(f"{name}, normed", mixed, branch.into, wanted=wanted))
            return
        how = {"wanted": wanted, "weighed": self._weighed is None}
        to = into if self._short is None else Into(Buffer("short of experts", self._short[1].inputs))
        program.add(Combine(name=f"{name}.experts", x=self._each, routes=self._routes, to=to, **how))
        if self._short is not None:
            x, weight = to.buffer, self._short[1]
            program.add(steps.Linear(name=f"{name}.lengthened", wanted=wanted, x=x, to=into, weight=weight))
        if self._shared is not None:
            (shared, gate), name, into = self._shared, f"{name}.shared_expert", replace(into, add=True)
            if gate is None:
                shared.close(program, name, Branch(into, None, wanted))
                return
            shared.close(program, name, Branch(Into(branch.before), None, wanted))
            program.add(steps.Gate(name=name, wanted=wanted, x=branch.before, gates=self._gate, to=into))


class BesideSteps:
    """Builds the steps of a mixture of experts parallel to a feed-forward."""

    def __init__(self, beside: Beside, form: Form, keep: Keep) -> None:
        self._experts, self._before = ExpertSteps(beside.experts, form, keep), NormParts.of(beside.before, keep)
        self._after = [NormParts.of(norm, keep) for norm in beside.after]

    def build(
        self, program: Program, name: str, hidden: Buffer, mlp: FeedForwardSteps | ExpertSteps, branch: Branch
    ) -> None:
        """Append the steps of the experts, and those that add their results and the opened `mlp`'s to the rows."""
        wanted, (of_mlp, of_experts) = branch.wanted, self._after
        read, both = Buffer("normed for experts", hidden.width), Buffer("feed-forward and experts", hidden.width)
        mlp.close(program, f"{name}.mlp", Branch(Into(both), of_mlp, wanted))
        program.add(self._before.step(f"{name}.norm before the experts", hidden, Into(read), wanted=wanted))
        self._experts.open(program, name, read, wanted=wanted, hidden=hidden)
        self._experts.close(program, name, Branch(Into(both, add=True), of_experts, wanted))
        assert branch.norm is not None, "the description says so"
        program.add(branch.norm.step(f"{name}.experts and mlp, normed", both, branch.into, wanted=wanted))


def _one(weight: Any) -> list[Any]:
    return [weight]


def _turns(weight: np.ndarray | Quantized) -> list[Any]:
    """Split a weight, or bias, in which gates alternate with the outputs that they multiply."""
    of = (slice(None, None, 2), slice(1, None, 2))
    return [rows_of(weight, part) for part in of]


def _each(weights: np.ndarray | Quantized) -> list[Any]:
    """Return the weight of each expert, from [experts, outputs, inputs]."""
    return [rows_of(weights, i) for i in range(weights.shape[0])]
