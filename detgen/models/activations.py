"""What classes of activation modules compute."""

from __future__ import annotations

from typing import Any

from detgen.models.parts import UnknownError
from detgen.program.operands import Activation

ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "GELU": Activation.GELU,
    "GELUActivation": Activation.GELU,
    "ReLU": Activation.RELU,
    "BloomGelu": Activation.GELU_TANH,
}


def activation_of(module: Any) -> Activation:
    """The activation of a feed-forward.

    Raises:
        UnknownError: if it is another one.
    """
    found = next(
        getattr(module, name) for name in ("act_fn", "activation_fn", "act", "gelu_impl") if hasattr(module, name)
    )
    name = type(found).__name__
    if getattr(found, "approximate", "none") != "none":  # torch's own module
        name = "GELUTanh"
    if name not in ACTIVATIONS:
        raise UnknownError(f"activation {name}")
    return ACTIVATIONS[name]
