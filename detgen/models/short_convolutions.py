"""Describes short convolutions: what stands for an attention in most layers of LFM2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.parts import Linear, ShortConvolution, UnknownError, some_rows
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from torch import nn


def convolution_shape(net: Any) -> StateShape:
    """What a net keeps of a sequence."""
    return StateShape(channels=net.conv.in_channels, taps=net.conv_kernel_size)


def short_convolution(
    net: Any, linear_of: Callable[[nn.Module], Linear], array_of: Callable[[nn.Parameter], np.ndarray]
) -> ShortConvolution:
    """The description of a transformers module; arguments and errors as `delta_net`."""
    shape = convolution_shape(net)
    weight, bias = taps_of(net.conv, shape, array_of)
    each, projected = shape.channels, linear_of(net.in_proj)
    before, after, x = (some_rows(projected, slice(i * each, (i + 1) * each)) for i in range(3))
    return ShortConvolution(
        shape=shape, x=x, before=before, after=after, weight=weight, bias=bias, out=linear_of(net.out_proj)
    )


def taps_of(
    convolution: Any, shape: StateShape, array_of: Callable[[nn.Parameter], np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The weight, [taps, channels], and the bias of a convolution of each channel.

    Raises:
        UnknownError: if it is another one.
    """
    weight = floats(array_of(convolution.weight))
    if tuple(weight.shape) != (shape.channels, 1, shape.taps):
        raise UnknownError("a convolution that mixes channels")
    bias = None if convolution.bias is None else floats(array_of(convolution.bias))
    return np.ascontiguousarray(weight[:, 0].T), bias
