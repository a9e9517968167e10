"""Which function each class of activation modules computes."""

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
    "FastGELUActivation": Activation.GELU_TANH,
    "GELU": Activation.GELU,
    "GELUActivation": Activation.GELU,
    "ReLU": Activation.RELU,
    "ReLUSquaredActivation": Activation.RELU_SQUARED,
    "BloomGelu": Activation.GELU_TANH,
}
_NAMES = ("act_fn", "activation_fn", "act", "activation", "gelu_impl")  # of what a feed-forward has
# Modules whose forward names their activation.
_NAMED = dict.fromkeys(("Lfm2MLP", "Lfm2MoeMLP", "Lfm2MoeExperts", "Lfm3MLP"), Activation.SILU)


def activation_of(module: Any) -> Activation:
    """Return the activation of a feed-forward.

    Raises:
        UnknownError: if it is not known.
    """
    if type(module).__name__ in _NAMED:
        return _NAMED[type(module).__name__]
    found = next(getattr(module, name) for name in _NAMES if hasattr(module, name))
    name = type(found).__name__
    if getattr(found, "approximate", "none") != "none":  # torch's own module
        name = "GELUTanh"
    if name not in ACTIVATIONS:
        raise UnknownError(f"activation {name}")
    return ACTIVATIONS[name]
