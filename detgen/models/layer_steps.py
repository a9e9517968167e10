"""The steps of a layer of a decoder: attention, feed-forward, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.angles import turns
from detgen.kernels.c.panels import halves, joined, stacked
from detgen.kernels.c.quantizing import STORAGE, Form, Quantized, kind
from detgen.models.description import Experts, FeedForward, Layer, Linear, Norm, UnknownError
from detgen.models.rotary import Rotary
from detgen.program import steps
from detgen.program.experts import Combine, ExpertLinear, Route, Sort
from detgen.program.operands import PANEL, Buffer, Cache, Into, Weight
from detgen.program.program import Program

_POSITIONS = 2048  # for which angles are worked out at first

# Gives the tensor that steps read instead of one that was made for them: where its numbers are kept.
Keep: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """Keeps a tensor where it was made."""
    return x


class Angles:
    """Cosines and sines of the positions so far, by what rotates."""

    def __init__(self, keep: Keep) -> None:
        self.positions = 0
        self._keep = keep
        self._tables: dict[tuple[bytes, float], tuple[torch.Tensor, torch.Tensor]] = {}

    def reach(self, positions: int) -> None:
        """Have room for that many positions, and some more."""
        self.positions = max(_POSITIONS, 1 << (positions - 1).bit_length())
        self._tables.clear()

    def of(self, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [positions, angles] each."""
        key = rotary.frequencies.tobytes(), rotary.amplitude
        if key not in self._tables:
            cosines, sines = turns(rotary.frequencies, rotary.amplitude, 0, self.positions)
            self._tables[key] = self._keep(cosines), self._keep(sines)
        return self._tables[key]


class LayerSteps:
    """The parts of a layer, as steps take them."""

    def __init__(
        self,
        layer: Layer,
        traits: AttentionTraits,
        width: int,
        form: Form,
        keep: Keep,
    ) -> None:
        heads, kv_heads, size = layer.heads, layer.kv_heads, layer.size
        self._width = width
        self._queries, self._keys = heads * size, kv_heads * size
        self._heads = {"heads": heads, "kv_heads": kv_heads, "size": size, "values": size}
        self._traits, self._scale = traits, traits.scale * (layer.query_scale or 1.0)
        self._rotary, self._interleaved = layer.rotary, layer.interleaved
        self._norms = [None if norm is None else NormParts.of(norm, keep) for norm in layer.norms]
        sizes = zip("qk", (self._queries, self._keys), layer.head_norms, strict=True)
        self._head_norms = {
            part: NormParts.of(norm, keep, entries) for part, entries, norm in sizes if norm is not None
        }
        self._sinks = None if layer.sinks is None else keep(layer.sinks)
        self._qkv, self._out = side_by_side(layer.qkv, form, keep), joint([layer.out], form, keep)
        mlp = layer.mlp
        self._mlp = _FeedForward(mlp, form, keep) if isinstance(mlp, FeedForward) else _Experts(mlp, form, keep)
        self._parallel, self._residual = layer.parallel, layer.residual

    def build(
        self, program: Program, name: str, angles: Angles, keys: torch.Tensor, values: torch.Tensor, *, last: bool
    ) -> None:
        """Append the layer's steps; behind the attention of the last layer, those of the wanted rows alone."""
        cache = Cache(**self._heads, keys=keys, kept=values, storage=STORAGE[keys.dtype])
        hidden, attended = Buffer("hidden", self._width), Buffer("attended", self._queries)
        qkv = Buffer("qkv", self._queries + 2 * self._keys)
        before, after, before_mlp, after_mlp = self._norms
        read = self._normed(program, f"{name}.norm before the attention", before, hidden)
        for at, weight in self._qkv:
            part = f"{name}.self_attn.qkv_proj" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=Into(qkv), at=at, weight=weight))
        for part, norm in self._head_norms.items():
            at = 0 if part == "q" else self._queries
            program.add(norm.step(f"{name}.self_attn.{part}_norm", qkv, Into(qkv), at=at))
        program.add(self._rotated(f"{name}.self_attn, rotated", qkv, cache, angles, last=last))
        program.add(
            steps.Attend(
                name=f"{name}.self_attn",
                qkv=qkv,
                cache=cache,
                to=attended,
                scale=self._scale,
                window=self._traits.window or 0,
                chunk=self._traits.chunk or 0,
                softcap=self._traits.softcap or 0.0,
                sinks=self._sinks,
            )
        )
        if last:
            hidden = _taken(program, "rows wanted", hidden)
            attended = _taken(program, "rows wanted, attended", attended)
            if self._parallel and before is not None and before_mlp is None:
                read = _taken(program, "rows wanted, normed", read)
        if self._parallel:  # before the attention's results are added to what the feed-forward reads
            if before_mlp is not None:
                read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            elif before is None:
                read = hidden
            self._mlp.open(program, f"{name}.mlp", read, wanted=last)
        into = Into(hidden, add=True, factor=self._residual)
        Branch(into, after, last).add(program, f"{name}.self_attn.o_proj", self._out, attended)
        if not self._parallel:
            read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            self._mlp.open(program, f"{name}.mlp", read, wanted=last)
        self._mlp.close(program, f"{name}.mlp", Branch(into, after_mlp, last))

    def _normed(
        self, program: Program, name: str, norm: NormParts | None, x: Buffer, *, wanted: bool = False
    ) -> Buffer:
        """Append a norm, if there is one; the buffer that holds what is read after it."""
        if norm is None:
            return x
        normed = Buffer("normed", self._width)
        program.add(norm.step(name, x, Into(normed), wanted=wanted))
        return normed

    def _rotated(self, name: str, qkv: Buffer, cache: Cache, angles: Angles, *, last: bool) -> steps.Rotate:
        plain = steps.Rotate(name=name, qkv=qkv, cache=cache, interleaved=self._interleaved, last=last)
        if self._rotary is None:
            return plain
        cosines, sines = angles.of(self._rotary)
        return replace(plain, turned=2 * len(self._rotary.frequencies), cosines=cosines, sines=sines)


def _taken(program: Program, name: str, x: Buffer) -> Buffer:
    """Append what takes the wanted rows."""
    to = Buffer(f"wanted {x.name}", x.width)
    program.add(steps.Take(name=name, x=x, to=to))
    return to


class NormParts(NamedTuple):
    """A norm, as its step takes it; see `steps.Norm`."""

    vectors: int
    size: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    centred: bool

    @classmethod
    def of(cls, norm: Norm, keep: Keep, entries: int | None = None) -> NormParts:
        """A norm of a row with that many entries, of each head if it is one of heads; without a number, of a row."""
        if norm.weight is None:
            raise UnknownError("a norm without a weight")
        weight = keep(norm.weight.contiguous())
        bias = None if norm.bias is None else keep(norm.bias.contiguous())
        size = weight.shape[-1]
        return cls(1 if entries is None else entries // size, size, weight, bias, norm.epsilon, norm.centred)

    def step(self, name: str, x: Buffer, to: Into, *, at: int = 0, wanted: bool = False) -> steps.Norm:
        """The step."""
        return steps.Norm(name=name, wanted=wanted, x=x, to=to, at=at, own=self.weight.ndim == 2, **self._asdict())


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
        self._up = joint(mlp.up, form, keep, gated=mlp.gated)
        self._activation, self._gated = mlp.activation, mlp.gated
        self.down = joint([mlp.down], form, keep)
        self.activated = Buffer("activated", self.down.inputs)

    def open(self, program: Program, name: str, read: Buffer, *, wanted: bool) -> None:
        """Append what reads the layer's rows."""
        program.add(
            steps.Linear(
                name=f"{name}.up_proj",
                wanted=wanted,
                x=read,
                to=Into(self.activated),
                weight=self._up,
                activation=self._activation,
                gated=self._gated,
            )
        )

    def close(self, program: Program, name: str, branch: Branch) -> None:
        """Append what is added to them."""
        branch.add(program, f"{name}.down_proj", self.down, self.activated)


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
        gates: Callable[[Any], list[Any]] = _turns if mlp.interleaved else halves
        biases: tuple[Any, Any] = (
            ([], []) if mlp.biases is None else ([gates(b) for b in mlp.biases[0]], [[b] for b in mlp.biases[1]])
        )
        self._up = _kept(stacked([gates(weight) for weight in _each(mlp.up)], PANEL // 2, form, biases[0]), keep)
        self._down = _kept(stacked([[weight] for weight in _each(mlp.down)], PANEL, form, biases[1]), keep)
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
        logits, routes = self._logits, self._routes
        for step in (
            steps.Linear(name=f"{name}.gate", wanted=wanted, x=read, to=Into(logits), weight=self._router),
            Route(name=f"{name}.routes", wanted=wanted, x=logits, to=routes, **self._routing),
            Sort(name=f"{name}.rows of experts", wanted=wanted, routes=routes, experts=self._experts),
            ExpertLinear(
                name=f"{name}.experts.up_proj",
                wanted=wanted,
                x=read,
                routes=routes,
                to=self._activated,
                weight=self._up,
                activation=self._activation,
                gated=True,
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
        program.add(Combine(name=f"{name}.experts", wanted=wanted, x=self._each, routes=self._routes, to=into))
        if self._shared is not None:
            (shared, gate), name = self._shared, f"{name}.shared_expert"
            if gate is None:
                shared.close(program, name, Branch(into, None, wanted))
                return
            shared.close(program, name, Branch(Into(branch.before), None, wanted))
            program.add(steps.Gate(name=name, wanted=wanted, x=branch.before, factors=self._gate, to=into))


def joint(linears: list[Linear], form: Form, keep: Keep, *, gated: bool = False) -> Weight:
    """Linear layers that read the same input, as one: behind each other, or a gate and what it opens in pairs.

    The form is as in `panels`.
    """
    weights, biases = [one.weight for one in linears], [one.bias for one in linears if one.bias is not None]
    return _kept(joined(weights, biases, form, gated=gated), keep)


def side_by_side(linears: list[Linear], form: Form, keep: Keep) -> list[tuple[int, Weight]]:
    """Linear layers that read the same input and write one row, and where the results of each begin there.

    Those that follow each other and are stored in the same way are one; for `form` see `joint`.
    """
    found, at = [], 0
    for _, some in groupby(linears, lambda one: kind(one.weight)):
        weight = joint(list(some), form, keep)
        found.append((at, weight))
        at += weight.outputs
    return found


def _turns(weight: torch.Tensor | Quantized) -> list[Any]:
    """A gate and what it opens, of one weight, or of a bias, in which they take turns."""
    of = (slice(None, None, 2), slice(1, None, 2))
    return [weight.rows(part) if isinstance(weight, Quantized) else weight[part] for part in of]


def _each(weights: torch.Tensor | Quantized) -> list[torch.Tensor | Quantized]:
    """The weights of each expert, of [experts, outputs, inputs]."""
    return [weights.rows(i) if isinstance(weights, Quantized) else weights[i] for i in range(weights.shape[0])]


def _kept(weight: Weight, keep: Keep) -> Weight:
    """The same with other tensors."""
    found = {f.name: getattr(weight, f.name) for f in fields(weight)}
    changed: dict[str, Any] = {name: keep(x) for name, x in found.items() if isinstance(x, torch.Tensor)}
    scales = None if weight.scales is None else weight.scales.each(keep)
    return replace(weight, scales=scales, **changed)
