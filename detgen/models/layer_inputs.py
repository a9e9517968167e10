"""Describes and builds parts that only Gemma 3n and 4 have: vectors that tokens give to each layer, and experts
parallel to a feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detgen.kernels.c.quantizing import STORAGE, Form
from detgen.models.activations import activation_of
from detgen.models.families import first_of
from detgen.models.parts import Beside, Experts, LayerInput, LayerInputs, UnknownError
from detgen.models.step_parts import Branch, Keep, NormParts, joint, taken
from detgen.models.stored import whole
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into, name_of
from detgen.program.program import Program

if TYPE_CHECKING:
    from detgen.models.description import Description

_NAME = "layer inputs"


def layer_inputs_of(of: Description, vocabulary: int) -> LayerInputs | None:
    """Describe the vectors that tokens give to each layer; None if there are none.

    Raises:
        UnknownError: if some tokens have no entry.
    """
    inner = of.inner
    table = getattr(inner, "embed_tokens_per_layer", None)
    if table is None:
        return None
    weight, scale = of.weight(table.weight), float(inner.per_layer_input_scale)
    known, factor = weight.shape[0], first_of(inner, "per_layer_projection_scale per_layer_model_projection_scale")
    if known < vocabulary and type(inner).__name__ != "Gemma3nTextModel":  # gives these the entry of token 0
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
    """Describe how a layer takes its vector of the token; None if there are none."""
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
    """Describe a mixture parallel to a layer's feed-forward."""
    before = of.given_norm(layer.pre_feedforward_layernorm_2)
    after = of.given_norm(layer.post_feedforward_layernorm_1), of.given_norm(layer.post_feedforward_layernorm_2)
    return Beside(experts, before, after)


class LayerInputsSteps:
    """Builds the steps that make the vectors of all layers."""

    def __init__(self, inputs: LayerInputs, form: Form, keep: Keep) -> None:
        self._table, self._factor, self._scale = keep(whole(inputs.table)), inputs.factor, inputs.scale
        self._known = inputs.known
        self._linear, self._of_linear = joint([inputs.linear], form, keep), inputs.linear.factor
        self._norm = NormParts.of(inputs.norm, keep, self._linear.outputs)

    def build(self, program: Program, hidden: Buffer) -> None:
        """Append the steps; they read the embeddings."""
        made, table = Buffer(_NAME, self._linear.outputs), self._table
        into = Into(made, factor=self._of_linear)
        program.add(steps.Linear(name=_NAME, x=hidden, to=into, weight=self._linear))
        program.add(self._norm.step(f"{_NAME}, normed", made, Into(made, factor=self._scale)))
        into = Into(made, add=True, factor=self._factor * self._scale)
        how: dict[str, Any] = {"storage": STORAGE[name_of(table.dtype)], "known": self._known}
        program.add(steps.Embed(name="embed_tokens_per_layer", table=table, to=into, **how))


class LayerInputSteps:
    """Builds the steps by which a layer takes its vector."""

    def __init__(self, taking: LayerInput, form: Form, keep: Keep) -> None:
        self._at, self._width, self._activation = taking.at, taking.width, taking.activation
        self._gate, self._out = joint([taking.gate], form, keep), joint([taking.out], form, keep)
        self._norm = NormParts.of(taking.norm, keep)

    def build(self, program: Program, name: str, branch: Branch) -> None:
        """Append the steps that add to the layer's rows."""
        name, wanted = f"{name}.per_layer_input", branch.wanted
        inputs, opened = Buffer(_NAME, self._width), Buffer("layer input", self._gate.outputs)
        if wanted:
            inputs = taken(program, f"rows wanted, {_NAME}", inputs)
        how: dict[str, Any] = {"wanted": wanted, "to": Into(opened)}
        gate: dict[str, Any] = {"weight": self._gate, "activation": self._activation}
        program.add(steps.Linear(name=f"{name}_gate", x=branch.into.buffer, **gate, **how))
        gate = {"gates": opened, "function": Activation.NONE}
        program.add(steps.Gate(name=f"{name}, opened", x=inputs, at=self._at, **gate, **how))
        branch._replace(norm=self._norm).add(program, f"{name}_projection", self._out, opened)
