"""Describes gated delta nets: what stands for an attention in most layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.parts import DeltaNet, Linear, Norm, UnknownError, some_rows
from detgen.models.short_convolutions import taps_of
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from torch import nn


def delta_shape(net: Any) -> StateShape:
    """What a net keeps of a sequence."""
    return StateShape(
        channels=net.conv_dim,
        taps=net.conv_kernel_size,
        heads=net.num_v_heads,
        key_heads=net.num_k_heads,
        size=net.head_k_dim,
        values=net.head_v_dim,
    )


def delta_net(
    net: Any, linear_of: Callable[[nn.Module], Linear], array_of: Callable[[nn.Parameter], np.ndarray]
) -> DeltaNet:
    """The description of a transformers module.

    Args:
        net: the module.
        linear_of: describes a linear layer of it.
        array_of: gives a parameter of it.

    Raises:
        UnknownError: if it is another kind of net.
    """
    shape, norm = delta_shape(net), getattr(net, "norm", None) or net.o_norm
    if not type(norm).__name__.endswith("RMSNormGated") or {net.activation, norm.activation} != {"silu"}:
        raise UnknownError("a delta net with another norm or activation")
    if net.conv1d.bias is not None:
        raise UnknownError("a delta net whose convolution has a bias")
    weight, _ = taps_of(net.conv1d, shape, array_of)
    if hasattr(net, "o_norm"):  # OLMo Hybrid's
        qkv = [linear_of(getattr(net, name)) for name in ("q_proj", "k_proj", "v_proj")]
        gate, strength, decay = (linear_of(getattr(net, name)) for name in ("g_proj", "b_proj", "a_proj"))
    elif hasattr(net, "in_proj_qkvz"):
        joined, gate, strength, decay = _apart(linear_of(net.in_proj_qkvz), linear_of(net.in_proj_ba), shape)
        qkv = [joined]
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        joined, gate, strength, decay = (linear_of(getattr(net, name)) for name in names)
        qkv = [joined]
    return DeltaNet(
        shape=shape,
        qkv=qkv,
        gate=gate,
        decay=decay,
        strength=strength,
        weight=weight,
        rates=floats(array_of(net.A_log)),
        bias=floats(array_of(net.dt_bias)),
        norm=Norm(floats(array_of(norm.weight)), None, norm.variance_epsilon, centred=False),
        out=linear_of(net.o_proj if hasattr(net, "o_norm") else net.out_proj),
        doubled=bool(getattr(net, "allow_neg_eigval", False)),
    )


def _apart(qkvz: Linear, ba: Linear, shape: StateShape) -> tuple[Linear, Linear, Linear, Linear]:
    """Queries, keys and values; gates; strengths; decays, of layers whose results go by key heads."""
    share = shape.heads // shape.key_heads
    values = share * shape.values
    each = np.arange(qkvz.weight.shape[0]).reshape(shape.key_heads, -1)
    ends = np.cumsum((shape.size, shape.size, values))
    *qkv, gate = (x.ravel() for x in np.split(each, ends, 1))
    strength, decay = (x.ravel() for x in np.split(np.arange(2 * shape.heads).reshape(shape.key_heads, -1), 2, 1))
    of = ((qkvz, np.concatenate(qkv)), (qkvz, gate), (ba, strength), (ba, decay))
    first, second, third, fourth = (some_rows(linear, rows) for linear, rows in of)
    return first, second, third, fourth
