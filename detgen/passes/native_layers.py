"""The steps of a layer of a native decoder: attention, feed-forward, mixtures of experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.native.angles import turns
from detgen.kernels.native.panels import PANEL, joined, stacked
from detgen.kernels.native.program import Builder, Kind
from detgen.kernels.native.program import Norm as KindOfNorm
from detgen.passes.description import Experts, FeedForward, Layer, Linear, Norm, UnknownError
from detgen.passes.rotary import Rotary

_POSITIONS = 2048  # for which angles are worked out at first

Fields = dict[str, Any]


class Angles:
    """Cosines and sines of the positions so far, by what rotates."""

    def __init__(self) -> None:
        self.positions = 0
        self._tables: dict[tuple[bytes, float], tuple[torch.Tensor, torch.Tensor]] = {}

    def reach(self, positions: int) -> None:
        """Have room for that many positions, and some more."""
        self.positions = max(_POSITIONS, 1 << (positions - 1).bit_length())
        self._tables.clear()

    def of(self, rotary: Rotary) -> Fields:
        """Those fields of a step."""
        key = rotary.frequencies.tobytes(), rotary.amplitude
        if key not in self._tables:
            self._tables[key] = turns(rotary.frequencies, rotary.amplitude, 0, self.positions)
        cosines, sines = self._tables[key]
        return {"turned": 2 * len(rotary.frequencies), "cosines": cosines, "sines": sines}


class LayerSteps:
    """The parts of a layer, as steps take them."""

    def __init__(
        self, layer: Layer, keys: torch.Tensor, values: torch.Tensor, traits: AttentionTraits, width: int, bits: int
    ) -> None:
        heads, kv_heads, size = layer.heads, layer.kv_heads, layer.size
        self._width = width
        self._queries, self._keys = heads * size, kv_heads * size
        self._attention: Fields = {
            **{"heads": heads, "kv_heads": kv_heads, "size": size, "values": size},
            **{"keys": keys, "kept": values, "scale": traits.scale * (layer.query_scale or 1.0)},
            **{"window": traits.window or 0, "chunk": traits.chunk or 0, "softcap": traits.softcap or 0.0},
        }
        self._rotary, self._interleaved = layer.rotary, layer.interleaved
        self._norms = [None if norm is None else norm_fields(norm) for norm in layer.norms]
        sizes = zip("qk", (self._queries, self._keys), layer.head_norms, strict=True)
        self._head_norms = {part: norm_fields(norm, entries) for part, entries, norm in sizes if norm is not None}
        self._qkv, self._out = linear_fields(layer.qkv, bits), linear_fields([layer.out], bits)
        mlp = layer.mlp
        self._mlp = _FeedForward(mlp, bits) if isinstance(mlp, FeedForward) else _Experts(mlp, bits)
        self._parallel, self._residual = layer.parallel, layer.residual

    def build(self, b: Builder, name: str, angles: Angles, *, last: bool) -> None:
        """Append the layer's steps; behind the attention of the last layer, those of the wanted rows alone."""
        b.buffer("qkv", self._queries + 2 * self._keys)
        b.buffer("attended", self._queries)
        b.buffer("wanted attended", self._queries)
        b.buffer("branch", self._width)
        before, after, before_mlp, after_mlp = self._norms
        read = self._normed(b, f"{name}.norm before the attention", before, "hidden", "normed", {})
        b.step(f"{name}.self_attn.qkv_proj", Kind.LINEAR, **self._qkv, source=read, to="qkv")
        for part, norm in self._head_norms.items():
            at = 0 if part == "q" else self._queries
            place: Fields = {"source": "qkv", "source_at": at, "to": "qkv", "to_at": at}
            b.step(f"{name}.self_attn.{part}_norm", Kind.NORM, **norm, **place)
        turned: Fields = {} if self._rotary is None else angles.of(self._rotary)
        turned |= {"interleaved": self._interleaved, "last": last}
        b.step(f"{name}.self_attn, rotated", Kind.ROTATE, **self._attention, **turned, source="qkv", to="qkv")
        b.step(f"{name}.self_attn", Kind.ATTEND, **self._attention, source="qkv", to="attended")
        hidden, attended = "hidden", "attended"
        some: Fields = {"wanted": int(last)}
        if last:
            hidden, attended = "wanted hidden", "wanted attended"
            chosen: Fields = {"wanted": 1, "variant": 1}
            b.step("rows wanted", Kind.COPY, source="hidden", to=hidden, columns=self._width, **chosen)
            b.step("rows wanted, attended", Kind.COPY, source="attended", to=attended, columns=self._queries, **chosen)
            if self._parallel and before is not None and before_mlp is None:
                b.buffer("wanted normed", self._width)
                b.step("rows wanted, normed", Kind.COPY, source=read, to="wanted normed", columns=self._width, **chosen)
                read = "wanted normed"
        if self._parallel:  # before the attention's results are added to what the feed-forward reads
            if before_mlp is not None:
                read = self._normed(b, f"{name}.norm before the mlp", before_mlp, hidden, "normed", some)
            self._mlp.open(b, f"{name}.mlp", read, some)
        Branch(hidden, after, self._residual, some).add(b, f"{name}.self_attn.o_proj", self._out, attended)
        if not self._parallel:
            read = self._normed(b, f"{name}.norm before the mlp", before_mlp, hidden, "normed", some)
            self._mlp.open(b, f"{name}.mlp", read, some)
        self._mlp.close(b, f"{name}.mlp", Branch(hidden, after_mlp, self._residual, some))

    def _normed(self, b: Builder, name: str, norm: Fields | None, source: str, to: str, some: Fields) -> str:
        """Append a norm, if there is one; the buffer that holds what is read after it."""
        if norm is None:
            return source
        b.step(name, Kind.NORM, **norm, **some, source=source, to=to)
        return to


class Branch(NamedTuple):
    """Where the results of an attention or a feed-forward go.

    Attributes:
        to: buffer that they are added to.
        norm: that they go through; None for none.
        factor: that they are multiplied by.
        some: the rows, as fields of steps.
    """

    to: str
    norm: Fields | None
    factor: float
    some: Fields

    def add(self, b: Builder, name: str, linear: Fields, source: str) -> None:
        """Append the linear layer whose results they are."""
        more: Fields = {"add": 1, "factor": self.factor, **self.some}
        if self.norm is None:
            b.step(name, Kind.LINEAR, **linear, **more, source=source, to=self.to)
        else:
            b.step(name, Kind.LINEAR, **linear, **self.some, source=source, to="branch")
            b.step(f"{name}, normed", Kind.NORM, **self.norm, **more, source="branch", to=self.to)


class _FeedForward:
    """A feed-forward, as steps take it."""

    def __init__(self, mlp: FeedForward, bits: int) -> None:
        self._up: Fields = {
            **linear_fields(mlp.up, bits, gated=mlp.gated),
            "gated": mlp.gated,
            "variant": mlp.activation,
        }
        self._down, self._inner = linear_fields([mlp.down], bits), mlp.down.weight.shape[1]

    def open(self, b: Builder, name: str, read: str, some: Fields) -> None:
        """Append what reads the layer's rows."""
        b.buffer("activated", self._inner)
        b.step(f"{name}.up_proj", Kind.LINEAR, **self._up, **some, source=read, to="activated")

    def close(self, b: Builder, name: str, branch: Branch) -> None:
        """Append what is added to them."""
        branch.add(b, f"{name}.down_proj", self._down, "activated")

    def store(self, b: Builder, name: str, some: Fields) -> None:
        """Append what stores the results instead."""
        b.step(f"{name}.down_proj", Kind.LINEAR, **self._down, **some, source="activated", to="branch")


class _Experts:
    """A mixture of experts, as steps take it."""

    def __init__(self, mlp: Experts, bits: int) -> None:
        self._width, self._inner = mlp.down.shape[1:]
        self._router = linear_fields([mlp.router], 0)
        count: Fields = {"experts": len(mlp.up), "picks": mlp.picks}
        self._route: Fields = {**count, "variant": mlp.normalized}
        self._count = count
        gate: Fields = {"gated": 1, "variant": mlp.activation, "to_step": self._inner}
        self._up = {**stacked([list(weight.chunk(2)) for weight in mlp.up], PANEL // 2, bits), **count, **gate}
        steps = {"source_step": self._inner, "to_step": self._width}
        self._down = {**stacked([[weight] for weight in mlp.down], PANEL, bits), **count, **steps}
        self._shared = (
            None
            if mlp.shared is None
            else (
                _FeedForward(mlp.shared[0], bits),
                linear_fields([mlp.shared[1]], 0),
            )
        )

    def open(self, b: Builder, name: str, read: str, some: Fields) -> None:
        """Append what reads the layer's rows."""
        picks = self._count["picks"]
        b.buffer("router", self._count["experts"])
        b.buffer("routes", 2 * picks)
        b.buffer("experts activated", picks * self._inner)
        b.buffer("experts", picks * self._width)
        b.step(f"{name}.gate", Kind.LINEAR, **self._router, **some, source=read, to="router")
        b.step(f"{name}.routes", Kind.ROUTE, **self._route, **some, source="router", to="routes")
        b.step(f"{name}.rows of experts", Kind.SORT, **self._count, **some, source="routes", to="routes")
        b.step(f"{name}.experts.up_proj", Kind.LINEAR, **self._up, **some, source=read, to="experts activated")
        down: Fields = {**self._down, **some}
        b.step(f"{name}.experts.down_proj", Kind.LINEAR, **down, source="experts activated", to="experts")
        if self._shared is not None:
            shared, gate = self._shared
            b.buffer("shared gate", 1)
            b.step(f"{name}.shared_expert_gate", Kind.LINEAR, **gate, **some, source=read, to="shared gate")
            shared.open(b, f"{name}.shared_expert", read, some)

    def close(self, b: Builder, name: str, branch: Branch) -> None:
        """Append what is added to them."""
        more: Fields = {**branch.some, "columns": self._width, "add": 1, "factor": branch.factor, "to": branch.to}
        routed: Fields = {**self._count, "routes": b.buffers["routes"]}
        b.step(f"{name}.experts", Kind.COMBINE, **routed, **more, source="experts")
        if self._shared is not None:
            self._shared[0].store(b, f"{name}.shared_expert", branch.some)
            gated: Fields = {"routes": b.buffers["shared gate"], "variant": 2}
            b.step(f"{name}.shared_expert", Kind.COPY, **gated, **more, source="branch")


def norm_fields(norm: Norm, entries: int | None = None) -> Fields:
    """A norm of a row with that many entries, of each head if it is one of heads; without a number, of a whole row."""
    made: Fields = {"epsilon": norm.epsilon, "variant": KindOfNorm.LAYER if norm.centred else KindOfNorm.RMS}
    if norm.weight is None:
        raise UnknownError("a norm without a weight")
    weight = norm.weight.contiguous()
    columns = weight.shape[-1]
    made |= {"weight": weight, "columns": columns, "inputs": 1 if entries is None else entries // columns}
    if norm.bias is not None:
        made["bias"] = norm.bias.contiguous()
    return made | {"weight_step": columns if weight.ndim == 2 else 0}


def linear_fields(linears: list[Linear], bits: int, *, gated: bool = False) -> Fields:
    """Linear layers that read the same input, as one: behind each other, or a gate and what it opens in pairs.

    With 8 or 4 bits they are quantized where they fit, with 0 they stay as they are.
    """
    weights, biases = [one.weight for one in linears], [one.bias for one in linears if one.bias is not None]
    return joined(weights, biases, bits, gated=gated)
