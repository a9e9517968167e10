"""Maps classes of activation modules to the functions that they compute."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any

from detgen.models.parts import UnknownError
from detgen.program.operands import Activation

if TYPE_CHECKING:
    from detgen.models.description import Description

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
_LARGE = 50.0  # from here on, the softplus of a float is the float itself
_NAMES = ("act_fn", "activation_fn", "act", "activation", "gelu_impl")  # attributes of feed-forwards
# Modules whose activation is fixed in their forward.
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


def bend_of(of: Description, mlp: Any) -> dict[str, float] | None:
    """Return the numbers of a feed-forward's `steps.Xielu`; None if it has another activation."""
    found: Any = getattr(mlp, "act_fn", None)
    if type(found).__name__ != "XIELUActivation":
        return None
    rise, fall = (_softplus(of.array(alpha).item()) for alpha in (found.alpha_p, found.alpha_n))
    slope, least = float(found.beta.item()), float(found.eps.item())
    return {"rise": rise, "fall": slope + fall, "slope": slope, "least": least}


def _softplus(x: float) -> float:
    """log(1 + e^x), rounded correctly, which the C library's functions may not be."""
    with localcontext() as context:
        context.prec = 80  # more digits than 1 + e^x has of any float
        return float((1 + Decimal(x).exp()).ln()) if x < _LARGE else x
