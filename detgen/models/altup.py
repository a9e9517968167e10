"""Parts that only Gemma 3n has (streams of hidden states, low-rank layers, sparse gates): descriptions and steps."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.quantizing import MADE, Form
from detgen.models.parts import AltUp, Laurel, Streams, UnknownError
from detgen.models.step_parts import Branch, Keep, NormParts, joint, side_by_side, taken, wanted_of
from detgen.program import steps
from detgen.program.arrays import floats
from detgen.program.operands import Activation, Buffer, Into, Weight
from detgen.program.program import Program

if TYPE_CHECKING:
    from detgen.models.description import Description

_LEAST = 1e-5  # not a setting


def streams_of(of: Description) -> Streams | None:
    """Return the streams of hidden states; None if there are no parallel ones.

    Raises:
        UnknownError: if there is only one.
    """
    inner = of.inner
    if not hasattr(inner, "altup_projections"):
        return None
    begin, end = [
        [of.linear(each) for each in part] for part in (inner.altup_projections, inner.altup_unembed_projections)
    ]
    if not begin:
        raise UnknownError("a single stream")
    return Streams(begin, end, _LEAST)


def altup_of(of: Description, layer: Any) -> AltUp | None:
    """Return how a layer reads and changes its stream; None without parallel streams."""
    altup, config = getattr(layer, "altup", None), of.config
    if altup is None:
        return None
    correct, scales = of.linear(altup.correction_coefs), floats(of.array(altup.correct_output_scale))
    return AltUp(
        active=int(config.altup_active_idx) % int(config.altup_num_inputs),
        norm=of.given_norm(altup.router_norm),
        factor=float(altup.router_input_scale),
        router=of.linear(altup.modality_router),
        predict=of.linear(altup.prediction_coefs),
        correct=correct._replace(bias=np.ones(correct.weight.shape[0], np.float32)),
        scales=scales if config.altup_correct_scale else None,
    )


def laurel_of(of: Description, layer: Any) -> Laurel | None:
    """Return the low-rank layer parallel to a layer's attention; None if there is none."""
    laurel = getattr(layer, "laurel", None)
    if laurel is None:
        return None
    left, right = of.linear(laurel.linear_left), of.linear(laurel.linear_right)
    return Laurel(left, right, of.given_norm(laurel.post_laurel_norm))


def deviations_of(mlp: Any) -> float | None:
    """Return by how many standard deviations gates must exceed the mean to stay; None if all stay.

    Raises:
        UnknownError: if none stays.
    """
    share = np.float32(getattr(mlp, "activation_sparsity", 0.0))
    if share <= 0:
        return None
    if share >= 1:
        raise UnknownError("gates of which none stays")
    return NormalDist().inv_cdf(float(share))


class StreamsSteps:
    """Builds the steps that make the streams and combine them."""

    def __init__(self, streams: Streams, width: int, form: Form, keep: Keep) -> None:
        self._begin = side_by_side(streams.begin, form, keep)
        self._end = [joint([one], form, keep) for one in streams.end]
        self._width, self._least = width, streams.least
        self._streams = Buffer("streams", width * (1 + len(streams.end)))
        self._others = Buffer("other streams", width * len(streams.end))

    def begin(self, program: Program, hidden: Buffer) -> None:
        """Append the steps that make the streams from the embeddings."""
        others, to = self._others, Into(self._streams)
        for at, weight, _ in self._begin:
            name = "altup_projections" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=name, x=hidden, to=Into(others), at=at, weight=weight))
        self._match(program, hidden, wanted=False)
        program.add(steps.Copy(name="first stream", x=hidden, to=to))
        program.add(steps.Copy(name="other streams", x=others, to=to, at=self._width))

    def end(self, program: Program, hidden: Buffer) -> None:
        """Append the steps that combine the streams into hidden states of the wanted rows."""
        streams, others, width = wanted_of(self._streams), self._others, self._width
        stream = Buffer("stream", width)
        how: dict[str, Any] = {"wanted": True}
        program.add(steps.Copy(name="first stream", x=streams, to=Into(hidden), **how))
        for i, weight in enumerate(self._end):
            name, at = f"altup_unembed_projections.{i}", i * width
            program.add(steps.Copy(name=f"stream {i + 1}", x=streams, at=at + width, to=Into(stream), **how))
            program.add(steps.Linear(name=name, x=stream, to=Into(others), at=at, weight=weight, **how))
        self._match(program, hidden, wanted=True)
        for i in range(len(self._end)):
            into = Into(hidden, add=True)
            program.add(steps.Copy(name=f"stream {i + 1}, added", x=others, at=i * width, to=into, **how))
        into = Into(hidden, factor=1 / (1 + len(self._end)))
        program.add(steps.Copy(name="mean of the streams", x=hidden, to=into, **how))

    def _match(self, program: Program, first: Buffer, *, wanted: bool) -> None:
        """Append the steps that scale the other streams to the root mean square of the first."""
        width, others = self._width, self._others
        squares, magnitude = Buffer("squares", width), Buffer("magnitude", 1)
        how: dict[str, Any] = {"wanted": wanted}
        gate: dict[str, Any] = {"function": Activation.NONE, **how}
        norm: dict[str, Any] = {"size": width, "epsilon": 0.0, "least": self._least, "centred": False, **how}
        mean, root = Into(magnitude, factor=1 / width), Activation.ROOT
        program.add(steps.Gate(name="squares", x=first, gates=first, to=Into(squares), **gate))
        program.add(steps.Sum(name="sum of squares", x=squares, to=magnitude, **how))
        program.add(steps.Copy(name="mean square", x=magnitude, to=mean, **how))
        program.add(steps.Activate(name="magnitude", x=magnitude, to=Into(magnitude), function=root, **how))
        vectors = others.width // width
        program.add(steps.Norm(name="other streams, normed", x=others, to=Into(others), vectors=vectors, **norm))
        program.add(steps.Gate(name="other streams, matched", x=others, gates=magnitude, to=Into(others), **gate))


class AltUpSteps:
    """Builds the steps by which a layer reads one of several streams and changes all of them."""

    def __init__(self, altup: AltUp, width: int, form: Form, keep: Keep) -> None:
        plain: Form = form if form not in MADE else "none"  # never in few bits
        self._router, self._predict, self._correct = (
            joint([one], plain, keep) for one in (altup.router, altup.predict, altup.correct)
        )
        self._norm, self._factor = NormParts.of(altup.norm, keep), altup.factor
        self._scales = None if altup.scales is None else keep(altup.scales)
        self._width, self._at = width, altup.active * width
        self._streams = Buffer("streams", width * self._router.outputs)

    def predict(self, program: Program, name: str, hidden: Buffer) -> None:
        """Append the steps that predict the streams and give the layer its own."""
        name, streams = f"{name}.altup", self._streams
        active: dict[str, Any] = {"x": streams, "at": self._at, "to": Into(hidden)}
        program.add(steps.Copy(name=f"{name}, active stream", **active))
        found = self._routed(program, f"{name}.prediction_coefs", hidden, self._predict, wanted=False)
        mixing: dict[str, Any] = {"coefficients": found, "to": Into(streams, add=True), "size": self._width}
        program.add(steps.Mix(name=f"{name}, predicted", x=streams, **mixing))
        program.add(steps.Copy(name=f"{name}, active prediction", **active))

    def take(self, program: Program) -> None:
        """Append the steps that take the wanted rows of the predictions."""
        taken(program, "rows wanted, streams", self._streams)

    def correct(self, program: Program, name: str, hidden: Buffer, *, wanted: bool) -> Buffer:
        """Append the steps that correct the predictions by the layer's results; return the buffer of its input."""
        name, streams, input_ = f"{name}.altup", self._of(wanted), Buffer("corrected", self._width)
        found = self._routed(program, f"{name}.correction_coefs", hidden, self._correct, wanted=wanted)
        active: dict[str, Any] = {"x": streams, "at": self._at, "wanted": wanted}
        program.add(steps.Copy(name=f"{name}, innovation", to=Into(hidden, add=True, factor=-1.0), **active))
        mixing: dict[str, Any] = {"coefficients": found, "to": Into(streams, add=True), "size": self._width}
        program.add(steps.Mix(name=f"{name}, corrected", x=hidden, wanted=wanted, **mixing))
        program.add(steps.Copy(name=f"{name}, scaled", to=Into(input_), factors=self._scales, **active))
        return input_

    def add(self, program: Program, name: str, x: Buffer, *, wanted: bool) -> None:
        """Append the steps that add rows to all streams but the first."""
        streams, width = self._of(wanted), self._width
        for at in range(width, streams.width, width):
            into = Into(streams, add=True)
            program.add(steps.Copy(name=f"{name}, to stream {at // width}", x=x, to=into, at=at, wanted=wanted))

    def _of(self, wanted: bool) -> Buffer:
        return wanted_of(self._streams) if wanted else self._streams

    def _routed(self, program: Program, name: str, x: Buffer, weight: Weight, *, wanted: bool) -> Buffer:
        """Append the router's steps and a linear layer of their results without rounding; return its results."""
        read, routed = Buffer("router read", x.width), Buffer("modalities", self._router.outputs)
        into, found = Into(read, factor=self._factor), Buffer("coefficients", weight.outputs)
        program.add(self._norm.step(f"{name}, normed", x, into, wanted=wanted))
        tanh: dict[str, Any] = {"softcap": 1.0, "weight": self._router, "wanted": wanted}
        program.add(steps.Linear(name=f"{name}, modalities", x=read, to=Into(routed), **tanh))
        program.add(steps.Linear(name=name, x=routed, to=Into(found), weight=weight, wanted=wanted))
        return found


class LaurelSteps:
    """Builds the steps of the low-rank layer parallel to an attention."""

    def __init__(self, laurel: Laurel, form: Form, keep: Keep) -> None:
        self._left, self._right = joint([laurel.left], form, keep), joint([laurel.right], form, keep)
        self._norm = NormParts.of(laurel.norm, keep)

    def build(self, program: Program, name: str, read: Buffer, hidden: Buffer, *, wanted: bool) -> None:
        """Append the steps that add to rows with the attention's results and divide them by the root of 2."""
        name, short, into = f"{name}.laurel", Buffer("laurel", self._left.outputs), Into(hidden, add=True)
        how: dict[str, Any] = {"wanted": wanted}
        program.add(steps.Copy(name=f"{name}, its input", x=read, to=into, **how))
        program.add(steps.Linear(name=f"{name}.linear_left", x=read, to=Into(short), weight=self._left, **how))
        Branch(into, self._norm, wanted).add(program, f"{name}.linear_right", self._right, short)
        program.add(steps.Copy(name=f"{name}, divided", x=hidden, to=Into(hidden, factor=1 / sqrt(2)), **how))
