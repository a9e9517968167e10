"""The steps of a mixer of the first Mamba."""

from __future__ import annotations

from typing import Any

from detgen.kernels.c.quantizing import Form
from detgen.models.parts import SelectiveMamba
from detgen.models.rates import negative_powers
from detgen.models.short_convolution_steps import Taps
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, taken
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import SelectiveScan


class SelectiveMambaSteps:
    """A mixer of the first Mamba, as steps take it; attributes as those of `AttentionSteps`."""

    name, ends = "mamba", "out_proj"

    def __init__(self, net: SelectiveMamba, form: Form, keep: Keep) -> None:
        self._shape = net.shape
        self._x, self._gate, self._low, self._kq = (
            joint([linear], form, keep) for linear in (net.x, net.gate, net.low, net.kq)
        )
        self._step = joint([net.step], "none", keep)
        self._taps = Taps(net.weight, net.conv_bias, Activation.SILU, keep)
        self._norms = [None if norm is None else NormParts.of(norm, keep) for norm in net.norms]
        self._rates, self._bias, self._skip = keep(negative_powers(net.rates)), keep(net.bias), keep(net.skip)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; the buffer of its results, in the last layer those of the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed, times, scanned, gates = (
            Buffer(of, shape.values) for of in ("mixed", "times", "scanned", "gates of values")
        )
        low, kq = Buffer("low times", self._low.outputs), Buffer("keys and queries", 2 * shape.size)
        program.add(steps.Linear(name=f"{name}.in_proj, x", x=read, to=Into(mixed), weight=self._x))
        x = self._taps.build(program, f"{name}.conv1d", mixed, states)
        program.add(steps.Linear(name=f"{name}.x_proj, dt", x=x, to=Into(low), weight=self._low))
        program.add(steps.Linear(name=f"{name}.x_proj, B and C", x=x, to=Into(kq), weight=self._kq))
        normed = (("dt", low, 0), ("b", kq, 0), ("c", kq, shape.size))
        for (part, buffer, at), norm in zip(normed, self._norms, strict=True):
            if norm is not None:
                program.add(norm.step(f"{name}.{part}_layernorm", buffer, Into(buffer), at=at))
        program.add(steps.Linear(name=f"{name}.dt_proj", x=low, to=Into(times), weight=self._step))
        program.add(
            SelectiveScan(
                name=name,
                x=x,
                times=times,
                kq=kq,
                to=scanned,
                rates=self._rates,
                bias=self._bias,
                skip=self._skip,
                size=shape.size,
                values=shape.values,
                ring=states.kept.shape[1],
                state=states.state,
                kept=states.kept,
            )
        )
        if last:
            scanned = taken(program, "rows wanted, scanned", scanned)
            read = taken(program, "rows wanted, normed", read)
        program.add(steps.Linear(name=f"{name}.in_proj, z", wanted=last, x=read, to=Into(gates), weight=self._gate))
        how: dict[str, Any] = {"gates": gates, "function": Activation.SILU, "wanted": last}
        program.add(steps.Gate(name=f"{name}, gated", x=scanned, to=Into(scanned), **how))
        return scanned
