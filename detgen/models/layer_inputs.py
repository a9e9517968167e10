"""What Gemma 3n and 4 have beside the parts of others: vectors of the token; experts beside a feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detgen.models.activations import activation_of
from detgen.models.families import first_of
from detgen.models.parts import Beside, Experts, LayerInput, LayerInputs, UnknownError

if TYPE_CHECKING:
    from detgen.models.description import Description


def layer_inputs_of(of: Description, vocabulary: int) -> LayerInputs | None:
    """What tokens give to each layer; None if they give nothing.

    Raises:
        UnknownError: if some tokens have no entry.
    """
    inner = of.inner
    table = getattr(inner, "embed_tokens_per_layer", None)
    if table is None:
        return None
    weight, scale = of.weight(table.weight), float(inner.per_layer_input_scale)
    known, factor = weight.shape[0], first_of(inner, "per_layer_projection_scale per_layer_model_projection_scale")
    if known < vocabulary and type(inner).__name__ != "Gemma3nTextModel":  # which gives those the entry of token 0
        raise UnknownError("tokens that give nothing to layers")
    linear = of.linear(inner.per_layer_model_projection)._replace(factor=float(factor))
    return LayerInputs(
        table=weight,
        factor=float(table.embed_scale),
        known=known if known < vocabulary else 0,
        linear=linear,
        norm=of.given_norm(inner.per_layer_projection_norm),
        scale=scale,
    )


def layer_input_of(of: Description, layer: Any, index: int) -> LayerInput | None:
    """How a layer takes what tokens give it; None where they give nothing."""
    if getattr(layer, "per_layer_input_gate", None) is None:
        return None
    size = int(layer.hidden_size_per_layer_input)
    return LayerInput(
        at=index * size,
        width=len(of.layers) * size,
        gate=of.linear(layer.per_layer_input_gate),
        activation=activation_of(layer),
        out=of.linear(layer.per_layer_projection),
        norm=of.given_norm(layer.post_per_layer_input_norm),
    )


def beside_of(of: Description, layer: Any, experts: Experts) -> Beside:
    """A mixture beside a layer's feed-forward."""
    before = of.given_norm(layer.pre_feedforward_layernorm_2)
    after = of.given_norm(layer.post_feedforward_layernorm_1), of.given_norm(layer.post_feedforward_layernorm_2)
    return Beside(experts, before, after)
