"""Steps that do not round their inputs, for comparison with a forward in floating point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from detgen.program.arrays import each, tensor
from detgen.program.operands import Step, Weight
from detgen.program.storage import Storage, unpack


def widened(step: Step) -> Step:
    """Return the step with its weight in float32 if it would round its inputs, else unchanged."""
    made: Any = step  # of a kind that has a weight, or not
    weight = getattr(step, "weight", None)
    if not step.reads or not isinstance(weight, Weight) or not weight.storage.rounds:
        return step
    found: Step = replace(made, weight=in_floats(weight))
    return found


def in_floats(weight: Weight) -> Weight:
    """Return a weight in float32, as a tensor of the stored numbers; codes stay as they are."""
    weight = each(weight, tensor)
    data = weight.data if not weight.storage.rounds else unpack(weight.storage, weight.data, weight.least)
    data = data.float().contiguous()  # a single pair is a view
    if weight.scales is not None:
        scales, minima = weight.scales.floats(-2)
        groups = data.unflatten(-2, (-1, weight.scales.group)).mul_(scales.unsqueeze(-2))
        if minima is not None:
            groups.add_(minima.unsqueeze(-2))
    return replace(weight, data=data, scales=None, storage=Storage.FLOAT)
