"""Describes Mamba-2 mixers, those of all families that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.parts import Linear, Mamba, Norm, UnknownError, some_rows
from detgen.models.short_convolutions import taps_of
from detgen.models.skeleton import is_torch
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from torch import nn


def mamba_shape(net: Any) -> StateShape:
    """What a mixer keeps of a sequence."""
    return StateShape(
        channels=net.conv_dim,
        taps=net.conv_kernel_size,
        heads=net.num_heads,
        key_heads=net.n_groups,
        size=net.ssm_state_size,
        values=net.head_dim,
    )


def mamba(
    net: Any,
    linear_of: Callable[[nn.Module], Linear],
    array_of: Callable[[nn.Parameter], np.ndarray],
    factors: list[float],
) -> Mamba:
    """The description of a transformers module; other arguments and errors as `delta_net`.

    Args:
        net: the module.
        linear_of: see there.
        array_of: see there.
        factors: of its gates, values, keys, queries and steps.
    """
    shape = mamba_shape(net)
    keys, values = shape.key_heads * shape.size, shape.heads * shape.values
    if net.activation not in ("silu", "swish") or values != net.intermediate_size:
        raise UnknownError("a Mamba-2 mixer with another activation or size")
    projected, first = linear_of(net.in_proj), float(getattr(net, "ssm_in_multiplier", 1.0))
    if projected.bias is not None and first != 1:
        raise UnknownError("a bias of what reads multiplied rows")
    parts, at = [], 0
    for size, factor in zip((values, values, keys, keys, shape.heads), factors, strict=True):
        part = some_rows(projected, slice(at, at + size))
        parts.append(part._replace(factor=first * factor))
        at += size
    gate, x, b, c, step = parts
    weight, bias = taps_of(net.conv1d, shape, array_of)
    order = np.concatenate(np.split(np.arange(shape.channels), [values, values + keys])[::-1])
    norm, norm_first = _norm(net, array_of)
    return Mamba(
        shape=shape,
        qkv=[c, b, x],
        gate=gate,
        step=step,
        weight=np.ascontiguousarray(weight[:, order]),
        conv_bias=None if bias is None else bias[order],
        rates=floats(array_of(net.A_log)),
        bias=floats(array_of(net.dt_bias)),
        skip=floats(array_of(net.D)),
        limits=(float(net.time_step_limit[0]), float(net.time_step_limit[1])),
        norm=norm,
        norm_first=norm_first,
        out=linear_of(net.out_proj),
    )


def _norm(net: Any, array_of: Callable[[nn.Parameter], np.ndarray]) -> tuple[Norm | None, bool]:
    """Of its results, by groups, and whether it comes before the gate."""
    norm = net.norm
    if is_torch(norm, "Identity"):
        return None, False
    if not type(norm).__name__.endswith("RMSNormGated"):
        raise UnknownError("a Mamba-2 mixer with another norm")
    weight = floats(array_of(norm.weight))
    groups = norm.n_groups if hasattr(norm, "n_groups") else len(weight) // norm.group_size
    return (
        Norm(weight.reshape(groups, -1), None, norm.variance_epsilon, centred=False),
        bool(getattr(norm, "norm_before_gate", False)),
    )
