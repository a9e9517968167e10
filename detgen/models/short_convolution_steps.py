"""The steps of a short convolution, alone or as a part of other mixers."""

from __future__ import annotations

from typing import Any

import numpy as np

from detgen.kernels.c.quantizing import Form
from detgen.kernels.decoder import LayerStates
from detgen.models.parts import ShortConvolution
from detgen.models.step_parts import Angles, Entries, Keep, joint, taken
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import Convolve


class Taps:
    """The convolution itself, as steps take it."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, activation: Activation, keep: Keep) -> None:
        self._weight, self._bias = keep(weight), None if bias is None else keep(bias)
        self._activation = activation

    def build(self, program: Program, name: str, x: Buffer, states: LayerStates) -> Buffer:
        """Append its step; the buffer of its results."""
        to = Buffer("convolved", x.width)
        program.add(
            Convolve(
                name=name,
                x=x,
                to=to,
                weight=self._weight,
                bias=self._bias,
                activation=self._activation,
                taps=len(self._weight),
                ring=states.convolved.shape[1],
                kept=states.convolved,
            )
        )
        return to


class ShortConvolutionSteps:
    """A short convolution, as steps take it; attributes as those of `AttentionSteps`."""

    name, ends = "conv", "out_proj"

    def __init__(self, net: ShortConvolution, form: Form, keep: Keep) -> None:
        self._x, self._before, self._after = (joint([linear], form, keep) for linear in (net.x, net.before, net.after))
        self._taps = Taps(net.weight, net.bias, Activation.NONE, keep)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; the buffer of its results, in the last layer those of the wanted rows."""
        assert where.states is not None, "there is room for them"
        width = self._x.outputs
        mixed, gates = Buffer("mixed", width), Buffer("gates of values", width)
        program.add(steps.Linear(name=f"{name}.in_proj, x", x=read, to=Into(mixed), weight=self._x))
        program.add(steps.Linear(name=f"{name}.in_proj, B", x=read, to=Into(gates), weight=self._before))
        plain: dict[str, Any] = {"gates": gates, "function": Activation.NONE}
        program.add(steps.Gate(name=f"{name}, gated before", x=mixed, to=Into(mixed), **plain))
        convolved = self._taps.build(program, f"{name}.conv", mixed, where.states)
        if last:
            convolved = taken(program, "rows wanted, convolved", convolved)
            read = taken(program, "rows wanted, normed", read)
        program.add(steps.Linear(name=f"{name}.in_proj, C", wanted=last, x=read, to=Into(gates), weight=self._after))
        program.add(steps.Gate(name=f"{name}, gated", wanted=last, x=convolved, to=Into(convolved), **plain))
        return convolved
