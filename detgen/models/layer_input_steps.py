"""The steps of what tokens give to each layer by themselves."""

from __future__ import annotations

from typing import Any

from detgen.kernels.c.quantizing import STORAGE, Form
from detgen.models.parts import LayerInput, LayerInputs
from detgen.models.step_parts import Branch, Keep, NormParts, joint, taken
from detgen.models.stored import whole
from detgen.program import steps
from detgen.program.operands import Activation, Buffer, Into, name_of
from detgen.program.program import Program

_NAME = "layer inputs"


class LayerInputsSteps:
    """What makes the vectors of all layers, as steps take it."""

    def __init__(self, inputs: LayerInputs, form: Form, keep: Keep) -> None:
        self._table, self._factor, self._scale = keep(whole(inputs.table)), inputs.factor, inputs.scale
        self._known = inputs.known
        self._linear, self._of_linear = joint([inputs.linear], form, keep), inputs.linear.factor
        self._norm = NormParts.of(inputs.norm, keep, self._linear.outputs)

    def build(self, program: Program, hidden: Buffer) -> None:
        """Append the steps, which read the embeddings."""
        made, table = Buffer(_NAME, self._linear.outputs), self._table
        into = Into(made, factor=self._of_linear)
        program.add(steps.Linear(name=_NAME, x=hidden, to=into, weight=self._linear))
        program.add(self._norm.step(f"{_NAME}, normed", made, Into(made, factor=self._scale)))
        into = Into(made, add=True, factor=self._factor * self._scale)
        how: dict[str, Any] = {"storage": STORAGE[name_of(table.dtype)], "known": self._known}
        program.add(steps.Embed(name="embed_tokens_per_layer", table=table, to=into, **how))


class LayerInputSteps:
    """How a layer takes its vector, as steps take it."""

    def __init__(self, taking: LayerInput, form: Form, keep: Keep) -> None:
        self._at, self._width, self._activation = taking.at, taking.width, taking.activation
        self._gate, self._out = joint([taking.gate], form, keep), joint([taking.out], form, keep)
        self._norm = NormParts.of(taking.norm, keep)

    def build(self, program: Program, name: str, branch: Branch) -> None:
        """Append what is added to the layer's rows."""
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
