"""Describes the modules that keep states of sequences, by the ends of their classes' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.delta_nets import delta_net, delta_shape
from detgen.models.mambas import mamba, mamba_shape, selective_mamba, selective_shape
from detgen.models.parts import Linear, Mixer
from detgen.models.short_convolutions import convolution_shape, short_convolution

if TYPE_CHECKING:
    from torch import nn

_SHAPES: dict[str, Callable[[Any], StateShape]] = {
    "GatedDeltaNet": delta_shape,
    "ShortConv": convolution_shape,
    "MambaMixer": selective_shape,
    **dict.fromkeys(("MambaLayer", "BambaMixer", "FalconH1Mixer", "Mamba2Mixer"), mamba_shape),
}


def state_shape_of(net: Any) -> StateShape | None:
    """What a module keeps of each sequence; None if it is none of those that are known."""
    kind = _kind(net)
    return _SHAPES[kind](net) if kind else None


def state_mixer(
    net: Any,
    layer: Any,
    config: Any,
    linear_of: Callable[[nn.Module], Linear],
    array_of: Callable[[nn.Parameter], np.ndarray],
) -> Mixer:
    """The description of such a module.

    Args:
        net: the module.
        layer: that it is in.
        config: of the model.
        linear_of: describes a linear layer of it.
        array_of: gives a parameter of it.

    Raises:
        UnknownError: if it is another kind of net.
    """
    kind = _kind(net)
    if kind == "GatedDeltaNet":
        return delta_net(net, linear_of, array_of)
    if kind == "ShortConv":
        return short_convolution(net, linear_of, array_of)
    if kind == "MambaMixer":
        return selective_mamba(net, linear_of, array_of)
    found = mamba(net, linear_of, array_of, getattr(config, "ssm_multipliers", None) or [1.0] * 5)
    return replace(found, out=found.out._replace(factor=float(getattr(layer, "ssm_out_multiplier", 1.0))))


def _kind(net: Any) -> str:
    return next((kind for kind in _SHAPES if type(net).__name__.endswith(kind)), "")
