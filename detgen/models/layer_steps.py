"""The steps of a layer of a decoder: what mixes its rows, then a feed-forward or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.panels import halves, stacked
from detgen.kernels.c.quantizing import Form, Quantized
from detgen.models.attention_steps import AttentionSteps
from detgen.models.delta_steps import DeltaSteps
from detgen.models.mamba_steps import MambaSteps
from detgen.models.parts import DeltaNet, Experts, FeedForward, Layer, Mamba, Mixer, ShortConvolution
from detgen.models.short_convolution_steps import ShortConvolutionSteps
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, kept, taken
from detgen.program import steps
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import PANEL, Activation, Buffer, Into, Step, Weight
from detgen.program.program import Program
from detgen.program.states import Watch

MixerSteps: TypeAlias = AttentionSteps | DeltaSteps | ShortConvolutionSteps | MambaSteps


class LayerSteps:
    """The parts of a layer, as steps take them."""

    def __init__(
        self,
        layer: Layer,
        traits: AttentionTraits | None,
        width: int,
        form: Form,
        keep: Keep,
    ) -> None:
        mlp = layer.mlp
        self._width = width
        self._mixers = [_mixer_steps(mixer, traits, form, keep) for mixer in layer.mixers]
        self._norms = [None if norm is None else NormParts.of(norm, keep) for norm in layer.norms]
        self._mlp = None
        if mlp is not None:
            self._mlp = _FeedForward(mlp, form, keep) if isinstance(mlp, FeedForward) else _Experts(mlp, form, keep)
        self._parallel, self._residual = layer.parallel, layer.residual

    def build(self, program: Program, name: str, angles: Angles, where: Entries, *, last: bool) -> None:
        """Append the layer's steps; behind the mixers of the last layer, those of the wanted rows alone."""
        hidden = read = Buffer("hidden", self._width)
        before, after, before_mlp, after_mlp = self._norms
        if last and not any(isinstance(mixer, AttentionSteps) for mixer in self._mixers):
            program.add(Watch(name=f"{name}, watched", x=hidden))
        if self._mixers:
            read = self._normed(program, f"{name}.norm before the attention", before, hidden)
        mixed = [mixer.build(program, f"{name}.{mixer.name}", read, angles, where, last=last) for mixer in self._mixers]
        if last:
            hidden = taken(program, "rows wanted", hidden)
            if self._parallel and before is not None and before_mlp is None:
                read = taken(program, "rows wanted, normed", read)
        mlp = self._mlp
        if self._parallel and mlp is not None:  # before the attention's results are added to what the mlp reads
            if before_mlp is not None:
                read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            elif before is None:
                read = hidden
            mlp.open(program, f"{name}.mlp", read, wanted=last)
        into = Into(hidden, add=True, factor=self._residual)
        for mixer, x in zip(self._mixers, mixed, strict=True):
            branch = Branch(replace(into, factor=into.factor * mixer.factor), after, last)
            branch.add(program, f"{name}.{mixer.name}.{mixer.ends}", mixer.out, x)
        if mlp is None:
            return
        if not self._parallel:
            read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            mlp.open(program, f"{name}.mlp", read, wanted=last)
        mlp.close(program, f"{name}.mlp", Branch(into, after_mlp, last))

    def _normed(
        self, program: Program, name: str, norm: NormParts | None, x: Buffer, *, wanted: bool = False
    ) -> Buffer:
        """Append a norm, if there is one; the buffer that holds what is read after it."""
        if norm is None:
            return x
        normed = Buffer("normed", self._width)
        program.add(norm.step(name, x, Into(normed), wanted=wanted))
        return normed


def _mixer_steps(mixer: Mixer, traits: AttentionTraits | None, form: Form, keep: Keep) -> MixerSteps:
    if isinstance(mixer, DeltaNet):
        return DeltaSteps(mixer, form, keep)
    if isinstance(mixer, ShortConvolution):
        return ShortConvolutionSteps(mixer, form, keep)
    if isinstance(mixer, Mamba):
        return MambaSteps(mixer, form, keep)
    assert traits is not None, "it was recorded"
    return AttentionSteps(mixer, traits, form, keep)


class Branch(NamedTuple):
    """Where the results of an attention or a feed-forward go.

    Attributes:
        into: takes them.
        norm: that they go through; None for none.
        wanted: whether they are those of the wanted rows.
    """

    into: Into
    norm: NormParts | None
    wanted: bool

    @property
    def before(self) -> Buffer:
        """Takes results that go through something else first."""
        return Buffer("branch", self.into.buffer.width)

    def add(self, program: Program, name: str, weight: Weight, x: Buffer) -> None:
        """Append the linear layer whose results they are."""
        to = self.into if self.norm is None else Into(self.before)
        program.add(steps.Linear(name=name, wanted=self.wanted, x=x, to=to, weight=weight))
        if self.norm is not None:
            program.add(self.norm.step(f"{name}, normed", self.before, self.into, wanted=self.wanted))


class _FeedForward:
    """A feed-forward, as steps take it."""

    def __init__(self, mlp: FeedForward, form: Form, keep: Keep) -> None:
        # A gate with a factor is no part of what it opens.
        apart = mlp.gated and mlp.up[0].factor != 1
        self._gate = (joint(mlp.up[:1], form, keep), mlp.up[0].factor) if apart else None
        self._up = joint(mlp.up[apart:], form, keep, gated=mlp.gated and not apart)
        self._activation, self._gated = mlp.activation, mlp.gated
        self.down, self._factor = joint([mlp.down], form, keep), mlp.down.factor
        self.activated = Buffer("activated", self.down.inputs)

    def open(self, program: Program, name: str, read: Buffer, *, wanted: bool) -> None:
        """Append what reads the layer's rows."""
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
        if self._gate is not None:
            (weight, factor), gates = self._gate, Buffer("gates of the mlp", activated.width)
            into = Into(gates, factor=factor)
            program.add(steps.Linear(name=f"{name}.gate_proj", wanted=wanted, x=read, to=into, weight=weight))
            how: dict[str, Any] = {"gates": gates, "function": self._activation, "wanted": wanted}
            program.add(steps.Gate(name=f"{name}, gated", x=activated, to=Into(activated), **how))

    def close(self, program: Program, name: str, branch: Branch) -> None:
        """Append what is added to them."""
        into = replace(branch.into, factor=branch.into.factor * self._factor)
        branch._replace(into=into).add(program, f"{name}.down_proj", self.down, self.activated)


class _Experts:
    """A mixture of experts, as steps take it."""

    def __init__(self, mlp: Experts, form: Form, keep: Keep) -> None:
        self._experts, width, inner = mlp.down.shape
        self._activation, self._limited = mlp.activation, mlp.limited
        self._routing: dict[str, Any] = {
            name: keep(x) if isinstance(x, torch.Tensor) else x for name, x in mlp.routing.items()
        }
        plain: Form = form if form == "pairs" else "none"  # never in few bits
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
        self._shared = None
        if mlp.shared is not None:
            shared, gate = mlp.shared
            self._shared = _FeedForward(shared, form, keep), None if gate is None else joint([gate], plain, keep)
        self._gate = Buffer("shared gate", 1)

    def open(self, program: Program, name: str, read: Buffer, *, wanted: bool) -> None:
        """Append what reads the layer's rows."""
        logits, routes, weighed = self._logits, self._routes, self._weighed
        weighing: list[Step] = []
        if weighed is not None:
            weighing = [Weigh(name=f"{name}.weighed", wanted=wanted, x=read, routes=routes, to=weighed)]
        for step in (
            steps.Linear(name=f"{name}.gate", wanted=wanted, x=read, to=Into(logits), weight=self._router),
            Route(name=f"{name}.routes", wanted=wanted, x=logits, to=routes, **self._routing),
            Sort(name=f"{name}.rows of experts", wanted=wanted, routes=routes, experts=self._experts),
            *weighing,
            ExpertLinear(
                name=f"{name}.experts.up_proj",
                wanted=wanted,
                x=read if weighed is None else weighed,
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
        """Append what is added to them."""
        wanted, into = branch.wanted, branch.into
        if branch.norm is not None:
            mixed = Buffer("mixed", into.buffer.width)
            self.close(program, name, Branch(Into(mixed), None, wanted))
            program.add(branch.norm.step(f"{name}, normed", mixed, into, wanted=wanted))
            return
        how = {"wanted": wanted, "weighed": self._weighed is None}
        program.add(Combine(name=f"{name}.experts", x=self._each, routes=self._routes, to=into, **how))
        if self._shared is not None:
            (shared, gate), name, into = self._shared, f"{name}.shared_expert", replace(into, add=True)
            if gate is None:
                shared.close(program, name, Branch(into, None, wanted))
                return
            shared.close(program, name, Branch(Into(branch.before), None, wanted))
            program.add(steps.Gate(name=name, wanted=wanted, x=branch.before, gates=self._gate, to=into))


def _one(weight: Any) -> list[Any]:
    return [weight]


def _turns(weight: torch.Tensor | Quantized) -> list[Any]:
    """A gate and what it opens, of one weight, or of a bias, in which they take turns."""
    of = (slice(None, None, 2), slice(1, None, 2))
    return [weight.rows(part) if isinstance(weight, Quantized) else weight[part] for part in of]


def _each(weights: torch.Tensor | Quantized) -> list[torch.Tensor | Quantized]:
    """The weights of each expert, of [experts, outputs, inputs]."""
    return [weights.rows(i) if isinstance(weights, Quantized) else weights[i] for i in range(weights.shape[0])]
