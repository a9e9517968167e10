"""Gated delta nets, which replace attention in most layers of Qwen3-Next and Qwen3.5: description and steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.quantizing import Form
from detgen.kernels.decoder import StateShape
from detgen.models.parts import DeltaNet, Linear, Norm, UnknownError, some_rows
from detgen.models.rates import negative_powers
from detgen.models.short_convolutions import Gates, Taps, taps_of, wanted_rows
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, side_by_side
from detgen.program import steps
from detgen.program.arrays import floats
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import DeltaRule

if TYPE_CHECKING:
    from detgen.models.description import Description

_EPSILON = 1e-6  # added to the sum of squares of a query or a key


def delta_shape(net: Any) -> StateShape:
    """Return what a net keeps of a sequence."""
    return StateShape(
        channels=net.conv_dim,
        taps=net.conv_kernel_size,
        heads=net.num_v_heads,
        key_heads=net.num_k_heads,
        size=net.head_k_dim,
        values=net.head_v_dim,
    )


def delta_net(of: Description, net: Any) -> DeltaNet:
    """Describe a transformers module.

    Raises:
        UnknownError: if it is another kind of net.
    """
    shape, norm = delta_shape(net), getattr(net, "norm", None) or net.o_norm
    if not type(norm).__name__.endswith("RMSNormGated") or {net.activation, norm.activation} != {"silu"}:
        raise UnknownError("a delta net with another norm or activation")
    if net.conv1d.bias is not None:
        raise UnknownError("a delta net whose convolution has a bias")
    weight, _ = taps_of(of, net.conv1d, shape)
    if hasattr(net, "o_norm"):  # OLMo Hybrid's
        qkv = [of.linear(getattr(net, name)) for name in ("q_proj", "k_proj", "v_proj")]
        gate, strength, decay = (of.linear(getattr(net, name)) for name in ("g_proj", "b_proj", "a_proj"))
    elif hasattr(net, "in_proj_qkvz"):
        joined, gate, strength, decay = _apart(of.linear(net.in_proj_qkvz), of.linear(net.in_proj_ba), shape)
        qkv = [joined]
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        joined, gate, strength, decay = (of.linear(getattr(net, name)) for name in names)
        qkv = [joined]
    return DeltaNet(
        shape=shape,
        qkv=qkv,
        gate=gate,
        decay=decay,
        strength=strength,
        weight=weight,
        rates=floats(of.array(net.A_log)),
        bias=floats(of.array(net.dt_bias)),
        norm=Norm(floats(of.array(norm.weight)), None, norm.variance_epsilon, centred=False),
        out=of.linear(net.o_proj if hasattr(net, "o_norm") else net.out_proj),
        doubled=bool(getattr(net, "allow_neg_eigval", False)),
    )


def _apart(qkvz: Linear, ba: Linear, shape: StateShape) -> tuple[Linear, Linear, Linear, Linear]:
    """Split joined layers by key heads into queries, keys and values; gates; strengths; decays."""
    share = shape.heads // shape.key_heads
    values = share * shape.values
    each = np.arange(qkvz.weight.shape[0]).reshape(shape.key_heads, -1)
    ends = np.cumsum((shape.size, shape.size, values))
    *qkv, gate = (x.ravel() for x in np.split(each, ends, 1))
    strength, decay = (x.ravel() for x in np.split(np.arange(2 * shape.heads).reshape(shape.key_heads, -1), 2, 1))
    return (
        some_rows(qkvz, np.concatenate(qkv)),
        some_rows(qkvz, gate),
        some_rows(ba, strength),
        some_rows(ba, decay),
    )


class DeltaSteps:
    """Builds the steps of a delta net; attributes as for `AttentionSteps`."""

    name, ends = "linear_attn", "out_proj"

    def __init__(self, net: DeltaNet, form: Form, keep: Keep) -> None:
        shape = self._shape = net.shape
        # Vectors have length 1, and queries are multiplied by the attention's scale, too. Keys of length sqrt 2 act
        # like strengths twice as large, but for a state smaller by sqrt 2, which queries of length sqrt 2 make up for.
        longer = math.sqrt(2) if net.doubled else 1.0
        made = zip("qk", (longer / shape.size, longer / math.sqrt(shape.size)), strict=True)
        self._lengths = {part: keep(np.full(shape.size, length, np.float32)) for part, length in made}
        self._qkv = side_by_side(net.qkv, form, keep)
        self._decay, self._strength = (joint([linear], form, keep) for linear in (net.decay, net.strength))
        self._gates = Gates(net.gate, Activation.SILU, form, keep)
        self._taps = Taps(net.weight, None, Activation.SILU, keep)
        self._bias, self._rates = keep(net.bias), keep(negative_powers(net.rates))
        self._norm = NormParts.of(net.norm, keep, shape.heads * shape.values)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; return the buffer of its results, in the last layer for the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed, ruled = Buffer("mixed", shape.channels), Buffer("ruled", shape.heads * shape.values)
        decay, strength = (Buffer(of, shape.heads) for of in ("decay", "strength"))
        for at, weight, factor in self._qkv:
            part = f"{name}.in_proj_qkv" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=Into(mixed, factor=factor), at=at, weight=weight))
        for part, to, weight in (("in_proj_a", decay, self._decay), ("in_proj_b", strength, self._strength)):
            program.add(steps.Linear(name=f"{name}.{part}", x=read, to=Into(to), weight=weight))
        convolved = self._taps.build(program, f"{name}.conv1d", mixed, states)
        for i, (part, length) in enumerate(self._lengths.items()):
            norm = NormParts(shape.key_heads, shape.size, length, None, _EPSILON / shape.size, centred=False)
            at = i * shape.key_heads * shape.size
            program.add(norm.step(f"{name}, {part} of length 1", convolved, Into(convolved), at=at))
        program.add(
            DeltaRule(
                name=name,
                qkv=convolved,
                decay=decay,
                strength=strength,
                to=ruled,
                rates=self._rates,
                bias=self._bias,
                heads=shape.heads,
                key_heads=shape.key_heads,
                size=shape.size,
                values=shape.values,
                ring=states.kept.shape[1],
                state=states.state,
                kept=states.kept,
            )
        )
        ruled, read = wanted_rows(program, ruled, read, last=last)
        program.add(self._norm.step(f"{name}.norm", ruled, Into(ruled), wanted=last))
        self._gates.build(program, name, "in_proj_z", ruled, read, wanted=last)
        return ruled
