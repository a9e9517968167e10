"""The steps of a Mamba-2 mixer."""

from __future__ import annotations

from typing import Any

from detgen.kernels.c.quantizing import Form
from detgen.models.parts import Mamba
from detgen.models.rates import negative_powers
from detgen.models.short_convolution_steps import Taps
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, side_by_side, taken
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import StateSpace


class MambaSteps:
    """A Mamba-2 mixer, as steps take it; attributes as those of `AttentionSteps`."""

    name, ends = "mamba", "out_proj"

    def __init__(self, net: Mamba, form: Form, keep: Keep) -> None:
        shape = self._shape = net.shape
        self._qkv = side_by_side(net.qkv, form, keep)
        self._gate, self._step = ((joint([linear], form, keep), linear.factor) for linear in (net.gate, net.step))
        self._taps = Taps(net.weight, net.conv_bias, Activation.SILU, keep)
        self._rates, self._bias, self._skip = keep(negative_powers(net.rates)), keep(net.bias), keep(net.skip)
        self._limits = net.limits
        self._norm = None if net.norm is None else NormParts.of(net.norm, keep, shape.heads * shape.values)
        self._norm_first = net.norm_first
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; the buffer of its results, in the last layer those of the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed, decay = Buffer("mixed", shape.channels), Buffer("decay", shape.heads)
        spaced, gates = (Buffer(of, shape.heads * shape.values) for of in ("spaced", "gates of values"))
        for at, weight, factor in self._qkv:
            into, part = Into(mixed, factor=factor), f"{name}.in_proj" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=into, at=at, weight=weight))
        weight, factor = self._step
        program.add(steps.Linear(name=f"{name}.in_proj, dt", x=read, to=Into(decay, factor=factor), weight=weight))
        program.add(
            StateSpace(
                name=name,
                qkv=self._taps.build(program, f"{name}.conv1d", mixed, states),
                decay=decay,
                to=spaced,
                rates=self._rates,
                bias=self._bias,
                skip=self._skip,
                least=self._limits[0],
                most=self._limits[1],
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
            spaced = taken(program, "rows wanted, of the state space", spaced)
            read = taken(program, "rows wanted, normed", read)
        weight, factor = self._gate
        into = Into(gates, factor=factor)
        program.add(steps.Linear(name=f"{name}.in_proj, z", wanted=last, x=read, to=into, weight=weight))
        if self._norm is not None and self._norm_first:
            program.add(self._norm.step(f"{name}.norm", spaced, Into(spaced), wanted=last))
        how: dict[str, Any] = {"gates": gates, "function": Activation.SILU, "wanted": last}
        program.add(steps.Gate(name=f"{name}, gated", x=spaced, to=Into(spaced), **how))
        if self._norm is not None and not self._norm_first:
            program.add(self._norm.step(f"{name}.norm", spaced, Into(spaced), wanted=last))
        return spaced
