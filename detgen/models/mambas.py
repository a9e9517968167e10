"""Describes and builds mixers of Mamba-2 and of the first Mamba, in all families that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.quantizing import Form
from detgen.kernels.decoder import StateShape
from detgen.models.parts import Linear, Mamba, Norm, SelectiveMamba, UnknownError, some_rows
from detgen.models.rates import negative_powers
from detgen.models.short_convolutions import Gates, Taps, taps_of, wanted_rows
from detgen.models.skeleton import is_parameter, is_torch
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, side_by_side
from detgen.program import steps
from detgen.program.arrays import floats
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.states import SelectiveScan, StateSpace

if TYPE_CHECKING:
    from detgen.models.description import Description


def mamba_shape(net: Any) -> StateShape:
    """Return what a mixer keeps of a sequence."""
    return StateShape(
        channels=net.conv_dim,
        taps=net.conv_kernel_size,
        heads=net.num_heads,
        key_heads=net.n_groups,
        size=net.ssm_state_size,
        values=net.head_dim,
    )


def mamba(of: Description, net: Any) -> Mamba:
    """Describe a transformers module; arguments and errors as for `delta_net`."""
    shape = mamba_shape(net)
    factors = getattr(of.config, "ssm_multipliers", None) or [1.0] * 5  # of gates, values, keys, queries and steps
    keys, values = shape.key_heads * shape.size, shape.heads * shape.values
    if net.activation not in ("silu", "swish") or values != net.intermediate_size:
        raise UnknownError("a Mamba-2 mixer with another activation or size")
    projected, first = of.linear(net.in_proj), float(getattr(net, "ssm_in_multiplier", 1.0))
    if projected.bias is not None and first != 1:
        raise UnknownError("a bias of what reads multiplied rows")
    parts, at = [], 0
    for size, factor in zip((values, values, keys, keys, shape.heads), factors, strict=True):
        part = some_rows(projected, slice(at, at + size))
        parts.append(part._replace(factor=first * factor))
        at += size
    gate, x, b, c, step = parts
    weight, bias = taps_of(of, net.conv1d, shape)
    order = np.concatenate(np.split(np.arange(shape.channels), [values, values + keys])[::-1])
    norm, norm_first = _grouped_norm(of, net)
    return Mamba(
        shape=shape,
        qkv=[c, b, x],
        gate=gate,
        step=step,
        weight=np.ascontiguousarray(weight[:, order]),
        conv_bias=None if bias is None else bias[order],
        rates=floats(of.array(net.A_log)),
        bias=floats(of.array(net.dt_bias)),
        skip=floats(of.array(net.D)),
        limits=(float(net.time_step_limit[0]), float(net.time_step_limit[1])),
        norm=norm,
        norm_first=norm_first,
        out=of.linear(net.out_proj),
    )


def _grouped_norm(of: Description, net: Any) -> tuple[Norm | None, bool]:
    """Return the norm of a mixer's results, by groups, and whether it comes before the gate."""
    norm = net.norm
    if is_torch(norm, "Identity"):
        return None, False
    if not type(norm).__name__.endswith("RMSNormGated"):
        raise UnknownError("a Mamba-2 mixer with another norm")
    weight = floats(of.array(norm.weight))
    groups = norm.n_groups if hasattr(norm, "n_groups") else len(weight) // norm.group_size
    return (
        Norm(weight.reshape(groups, -1), None, norm.variance_epsilon, centred=False),
        bool(getattr(norm, "norm_before_gate", False)),
    )


class MambaSteps:
    """Builds the steps of a Mamba-2 mixer; attributes as for `AttentionSteps`."""

    name, ends = "mamba", "out_proj"

    def __init__(self, net: Mamba, form: Form, keep: Keep) -> None:
        shape = self._shape = net.shape
        self._qkv = side_by_side(net.qkv, form, keep)
        self._step, self._step_factor = joint([net.step], form, keep), net.step.factor
        self._gates = Gates(net.gate, Activation.SILU, form, keep)
        self._taps = Taps(net.weight, net.conv_bias, Activation.SILU, keep)
        self._rates, self._bias, self._skip = keep(negative_powers(net.rates)), keep(net.bias), keep(net.skip)
        self._limits = net.limits
        self._norm = None if net.norm is None else NormParts.of(net.norm, keep, shape.heads * shape.values)
        self._norm_first = net.norm_first
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; return the buffer of its results, in the last layer for the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed, decay = Buffer("mixed", shape.channels), Buffer("decay", shape.heads)
        spaced = Buffer("spaced", shape.heads * shape.values)
        for at, weight, factor in self._qkv:
            into, part = Into(mixed, factor=factor), f"{name}.in_proj" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=into, at=at, weight=weight))
        into = Into(decay, factor=self._step_factor)
        program.add(steps.Linear(name=f"{name}.in_proj, dt", x=read, to=into, weight=self._step))
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
        spaced, read = wanted_rows(program, spaced, read, last=last)
        if self._norm is not None and self._norm_first:
            program.add(self._norm.step(f"{name}.norm", spaced, Into(spaced), wanted=last))
        self._gates.build(program, name, "in_proj, z", spaced, read, wanted=last)
        if self._norm is not None and not self._norm_first:
            program.add(self._norm.step(f"{name}.norm", spaced, Into(spaced), wanted=last))
        return spaced


def selective_shape(net: Any) -> StateShape:
    """Return what a mixer keeps of a sequence."""
    width = net.intermediate_size
    return StateShape(
        channels=width,
        taps=net.conv_kernel_size,
        heads=1,
        key_heads=1,
        size=net.ssm_state_size,
        values=width,
        selective=True,
    )


def selective_mamba(of: Description, net: Any) -> SelectiveMamba:
    """Describe a transformers module; arguments and errors as for `delta_net`."""
    shape, rank = selective_shape(net), net.time_step_rank
    if net.activation not in ("silu", "swish"):
        raise UnknownError("a Mamba mixer with another activation")
    projected, inner = of.linear(net.in_proj), of.linear(net.x_proj)
    weight, bias = taps_of(of, net.conv1d, shape)
    names = {"dt_layernorm": rank, "b_layernorm": shape.size, "c_layernorm": shape.size}
    times, key, query = (_norm(of, getattr(net, name, None), size) for name, size in names.items())
    return SelectiveMamba(
        shape=shape,
        x=some_rows(projected, slice(shape.values)),
        gate=some_rows(projected, slice(shape.values, 2 * shape.values)),
        weight=weight,
        conv_bias=bias,
        low=some_rows(inner, slice(rank)),
        kq=some_rows(inner, slice(rank, rank + 2 * shape.size)),
        norms=(times, key, query),
        step=Linear(of.array(net.dt_proj.weight), None),
        rates=np.ascontiguousarray(floats(of.array(net.A_log)).T),
        bias=floats(of.array(net.dt_proj.bias)),
        skip=floats(of.array(net.D)),
        out=of.linear(net.out_proj),
    )


def _norm(of: Description, norm: Any, size: int) -> Norm | None:
    """Describe a norm of `size` entries; Falcon Mamba's has no weights."""
    if norm is None:
        return None
    if is_parameter(norm.weight):
        return Norm(floats(of.array(norm.weight)), None, norm.variance_epsilon, centred=False)
    return Norm(np.ones(size, np.float32), None, norm.eps, centred=False)


class SelectiveMambaSteps:
    """Builds the steps of a mixer of the first Mamba; attributes as for `AttentionSteps`."""

    name, ends = "mamba", "out_proj"

    def __init__(self, net: SelectiveMamba, form: Form, keep: Keep) -> None:
        self._shape = net.shape
        self._x, self._low, self._kq = (joint([linear], form, keep) for linear in (net.x, net.low, net.kq))
        self._gates = Gates(net.gate, Activation.SILU, form, keep)
        self._step = joint([net.step], "none", keep)
        self._taps = Taps(net.weight, net.conv_bias, Activation.SILU, keep)
        self._norms = [None if norm is None else NormParts.of(norm, keep) for norm in net.norms]
        self._rates, self._bias, self._skip = keep(negative_powers(net.rates)), keep(net.bias), keep(net.skip)
        self.out, self.factor = joint([net.out], form, keep), net.out.factor

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; return the buffer of its results, in the last layer for the wanted rows."""
        assert where.states is not None, "there is room for them"
        shape, states = self._shape, where.states
        mixed, times, scanned = (Buffer(of, shape.values) for of in ("mixed", "times", "scanned"))
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
        scanned, read = wanted_rows(program, scanned, read, last=last)
        self._gates.build(program, name, "in_proj, z", scanned, read, wanted=last)
        return scanned
