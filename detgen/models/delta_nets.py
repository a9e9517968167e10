"""Describes gated delta nets: what stands for an attention in most layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from detgen.kernels.decoder import StateShape
from detgen.models.parts import DeltaNet, Linear, Norm, UnknownError, some_rows
from detgen.models.short_convolutions import taps_of


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
    net: Any, linear_of: Callable[[nn.Module], Linear], tensor_of: Callable[[nn.Parameter], torch.Tensor]
) -> DeltaNet:
    """The description of a transformers module.

    Args:
        net: the module.
        linear_of: describes a linear layer of it.
        tensor_of: gives a parameter of it.

    Raises:
        UnknownError: if it is another kind of net.
    """
    shape, norm = delta_shape(net), net.norm
    if not type(norm).__name__.endswith("RMSNormGated") or {net.activation, norm.activation} != {"silu"}:
        raise UnknownError("a delta net with another norm or activation")
    if net.conv1d.bias is not None:
        raise UnknownError("a delta net whose convolution has a bias")
    weight, _ = taps_of(net.conv1d, shape, tensor_of)
    if hasattr(net, "in_proj_qkvz"):
        qkv, gate, strength, decay = _apart(linear_of(net.in_proj_qkvz), linear_of(net.in_proj_ba), shape)
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        qkv, gate, strength, decay = (linear_of(getattr(net, name)) for name in names)
    return DeltaNet(
        shape=shape,
        qkv=qkv,
        gate=gate,
        decay=decay,
        strength=strength,
        weight=weight,
        rates=tensor_of(net.A_log).float(),
        bias=tensor_of(net.dt_bias).float(),
        norm=Norm(tensor_of(norm.weight).float(), None, norm.variance_epsilon, centred=False),
        out=linear_of(net.out_proj),
    )


def _apart(qkvz: Linear, ba: Linear, shape: StateShape) -> tuple[Linear, Linear, Linear, Linear]:
    """Queries, keys and values; gates; strengths; decays, of layers whose results go by key heads."""
    share = shape.heads // shape.key_heads
    values = share * shape.values
    each = torch.arange(qkvz.weight.shape[0]).view(shape.key_heads, -1)
    *qkv, gate = (x.flatten() for x in each.split((shape.size, shape.size, values, values), 1))
    strength, decay = (x.flatten() for x in torch.arange(2 * shape.heads).view(shape.key_heads, -1).split(share, 1))
    of = ((qkvz, torch.cat(qkv)), (qkvz, gate), (ba, strength), (ba, decay))
    first, second, third, fourth = (some_rows(linear, rows) for linear, rows in of)
    return first, second, third, fourth
