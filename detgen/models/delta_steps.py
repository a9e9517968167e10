"""The steps of a gated delta net."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from detgen.kernels.c.quantizing import Form
from detgen.models.parts import DeltaNet
from detgen.models.rates import negative_powers
from detgen.models.short_convolution_steps import Taps
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, side_by_side, taken
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import DeltaRule

_EPSILON = 1e-6  # is added to the sum of squares of a query or a key


class DeltaSteps:
    """A delta net, as steps take it; attributes as those of `AttentionSteps`."""

    name, ends = "linear_attn", "out_proj"

    def __init__(self, net: DeltaNet, form: Form, keep: Keep) -> None:
        shape = self._shape = net.shape
        # Of the length 1; queries are multiplied by the attention's scale besides. Keys of the length sqrt 2 are as
        # strengths twice as large are, but for a state of so many times less, which queries of that length make up for.
        longer = math.sqrt(2) if net.doubled else 1.0
        made = zip("qk", (longer / shape.size, longer / math.sqrt(shape.size)), strict=True)
        self._lengths = {part: keep(np.full(shape.size, length, np.float32)) for part, length in made}
        self._qkv = side_by_side(net.qkv, form, keep)
        self._gate, self._decay, self._strength = (
            joint([linear], form, keep) for linear in (net.gate, net.decay, net.strength)
        )
        self._taps = Taps(net.weight, None, Activation.SILU, keep)
        self._bias, self._rates = keep(net.bias), keep(negative_powers(net.rates))
        self._norm = NormParts.of(net.norm, keep, shape.heads * shape.values)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; the buffer of its results, in the last layer those of the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed = Buffer("mixed", shape.channels)
        gates, ruled = (Buffer(of, shape.heads * shape.values) for of in ("gates of values", "ruled"))
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
        if last:
            ruled = taken(program, "rows wanted, ruled", ruled)
            read = taken(program, "rows wanted, normed", read)
        program.add(steps.Linear(name=f"{name}.in_proj_z", wanted=last, x=read, to=Into(gates), weight=self._gate))
        program.add(self._norm.step(f"{name}.norm", ruled, Into(ruled), wanted=last))
        how: dict[str, Any] = {"gates": gates, "function": Activation.SILU, "wanted": last}
        program.add(steps.Gate(name=f"{name}, gated", x=ruled, to=Into(ruled), **how))
        return ruled
