"""Describes the mixers of the first Mamba, those of all families that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.parts import Linear, Norm, SelectiveMamba, UnknownError, some_rows
from detgen.models.short_convolutions import taps_of
from detgen.models.skeleton import is_parameter
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from torch import nn


def selective_shape(net: Any) -> StateShape:
    """What a mixer keeps of a sequence."""
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


def selective_mamba(
    net: Any, linear_of: Callable[[nn.Module], Linear], array_of: Callable[[nn.Parameter], np.ndarray]
) -> SelectiveMamba:
    """The description of a transformers module; arguments and errors as `delta_net`."""
    shape, rank = selective_shape(net), net.time_step_rank
    if net.activation not in ("silu", "swish"):
        raise UnknownError("a Mamba mixer with another activation")
    projected, inner = linear_of(net.in_proj), linear_of(net.x_proj)
    weight, bias = taps_of(net.conv1d, shape, array_of)
    names = {"dt_layernorm": rank, "b_layernorm": shape.size, "c_layernorm": shape.size}
    times, key, query = (_norm(getattr(net, name, None), size, array_of) for name, size in names.items())
    return SelectiveMamba(
        shape=shape,
        x=some_rows(projected, slice(shape.values)),
        gate=some_rows(projected, slice(shape.values, 2 * shape.values)),
        weight=weight,
        conv_bias=bias,
        low=some_rows(inner, slice(rank)),
        kq=some_rows(inner, slice(rank, rank + 2 * shape.size)),
        norms=(times, key, query),
        step=Linear(array_of(net.dt_proj.weight), None),
        rates=np.ascontiguousarray(floats(array_of(net.A_log)).T),
        bias=floats(array_of(net.dt_proj.bias)),
        skip=floats(array_of(net.D)),
        out=linear_of(net.out_proj),
    )


def _norm(norm: Any, size: int, array_of: Callable[[nn.Parameter], np.ndarray]) -> Norm | None:
    """A norm of so many entries; that of Falcon Mamba has no weights."""
    if norm is None:
        return None
    if is_parameter(norm.weight):
        return Norm(floats(array_of(norm.weight)), None, norm.variance_epsilon, centred=False)
    return Norm(np.ones(size, np.float32), None, norm.eps, centred=False)
