"""Short convolutions, which replace attention in most layers of LFM2, and what other mixers with states share.

Describes each kind of mixer, and builds its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.quantizing import Form
from detgen.kernels.decoder import LayerStates, StateShape
from detgen.models.parts import Linear, ShortConvolution, UnknownError, some_rows
from detgen.models.step_parts import Angles, Entries, Keep, joint, taken
from detgen.program import steps
from detgen.program.arrays import floats
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import Convolve

if TYPE_CHECKING:
    from detgen.models.description import Description


def convolution_shape(net: Any) -> StateShape:
    """Return what a net keeps of a sequence."""
    return StateShape(channels=net.conv.in_channels, taps=net.conv_kernel_size)


def short_convolution(of: Description, net: Any) -> ShortConvolution:
    """Describe a transformers module; arguments and errors as for `delta_net`."""
    shape = convolution_shape(net)
    weight, bias = taps_of(of, net.conv, shape)
    each, projected = shape.channels, of.linear(net.in_proj)
    before, after, x = (some_rows(projected, slice(i * each, (i + 1) * each)) for i in range(3))
    return ShortConvolution(
        shape=shape, x=x, before=before, after=after, weight=weight, bias=bias, out=of.linear(net.out_proj)
    )


def taps_of(of: Description, convolution: Any, shape: StateShape) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the weight, [taps, channels], and bias of a convolution of each channel.

    Raises:
        UnknownError: if it is another one.
    """
    weight = floats(of.array(convolution.weight))
    if tuple(weight.shape) != (shape.channels, 1, shape.taps):
        raise UnknownError("a convolution that mixes channels")
    bias = None if convolution.bias is None else floats(of.array(convolution.bias))
    return np.ascontiguousarray(weight[:, 0].T), bias


class Taps:
    """Builds the step of the convolution itself."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, activation: Activation, keep: Keep) -> None:
        self._weight, self._bias = keep(weight), None if bias is None else keep(bias)
        self._activation = activation

    def build(self, program: Program, name: str, x: Buffer, states: LayerStates) -> Buffer:
        """Append its step; return the buffer of its results."""
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


class Gates:
    """Builds the steps of gates of a mixer's results: a linear layer of its input."""

    def __init__(self, linear: Linear, activation: Activation, form: Form, keep: Keep) -> None:
        self._weight, self._factor, self._activation = joint([linear], form, keep), linear.factor, activation

    def build(self, program: Program, name: str, part: str, x: Buffer, read: Buffer, *, wanted: bool) -> None:
        """Append the steps, which change `x`."""
        gates = Buffer("gates of values", x.width)
        into = Into(gates, factor=self._factor)
        program.add(steps.Linear(name=f"{name}.{part}", wanted=wanted, x=read, to=into, weight=self._weight))
        how: dict[str, Any] = {"gates": gates, "function": self._activation, "wanted": wanted}
        program.add(steps.Gate(name=f"{name}, gated", x=x, to=Into(x), **how))


def wanted_rows(program: Program, x: Buffer, read: Buffer, *, last: bool) -> tuple[Buffer, Buffer]:
    """Return results and their inputs; in the last layer, append the steps that take the wanted rows of both."""
    if not last:
        return x, read
    return taken(program, f"rows wanted, {x.name}", x), taken(program, "rows wanted, normed", read)


class ShortConvolutionSteps:
    """Builds the steps of a short convolution; attributes as for `AttentionSteps`."""

    name, ends = "conv", "out_proj"

    def __init__(self, net: ShortConvolution, form: Form, keep: Keep) -> None:
        self._x, self._before = (joint([linear], form, keep) for linear in (net.x, net.before))
        self._after = Gates(net.after, Activation.NONE, form, keep)
        self._taps = Taps(net.weight, net.bias, Activation.NONE, keep)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; return the buffer of its results, in the last layer for the wanted rows."""
        assert where.states is not None, "there is room for them"
        width = self._x.outputs
        mixed, gates = Buffer("mixed", width), Buffer("gates of values", width)
        program.add(steps.Linear(name=f"{name}.in_proj, x", x=read, to=Into(mixed), weight=self._x))
        program.add(steps.Linear(name=f"{name}.in_proj, B", x=read, to=Into(gates), weight=self._before))
        gate = steps.Gate(name=f"{name}, gated before", x=mixed, to=Into(mixed), gates=gates, function=Activation.NONE)
        program.add(gate)
        convolved = self._taps.build(program, f"{name}.conv", mixed, where.states)
        convolved, read = wanted_rows(program, convolved, read, last=last)
        self._after.build(program, name, "in_proj, C", convolved, read, wanted=last)
        return convolved
