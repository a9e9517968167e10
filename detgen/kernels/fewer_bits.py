"""The weights of linear layers a second time, in 8 bits: by these a model drafts for itself.

What a pass computes by them is never committed, so its bits are no part of any promise.
"""

from __future__ import annotations

from dataclasses import replace

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import quantized
from detgen.program import steps
from detgen.program.experts import ExpertLinear
from detgen.program.operands import GROUP, Step, Weight
from detgen.program.program import Program
from detgen.program.storage import FORMATS, Storage

_Linear = steps.Linear | steps.ScoredLinear | ExpertLinear


class FewerBits:
    """Copies of weights in 8 bits, each made when it is first asked for.

    A weight with numbers that have no scale in float16 stays as it is: drafts are no reason to end a run.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Weight, Weight]] = {}  # by its place in memory, a weight and its copy

    def of(self, program: Program) -> Program:
        """The program itself, whose linear layers read copies of what takes more than 8 bits."""
        program.steps = [self._step(step) for step in program.steps]
        return program

    def _step(self, step: Step) -> Step:
        if not isinstance(step, _Linear) or not narrows(step.weight):
            return step
        weight = step.weight
        key = weight.data.data_ptr()
        if key not in self._made:
            try:
                self._made[key] = weight, quantized(weight, "q8")
            except EngineError:
                self._made[key] = weight, weight
        return replace(step, weight=replace(self._made[key][1], bias=weight.bias))


def narrows(weight: Weight) -> bool:
    """Whether a weight takes more than 8 bits, and has whole groups of inputs."""
    return weight.storage < Storage.BYTE and not weight.inputs % GROUP


def sizes(program: Program) -> tuple[int, int]:
    """Bytes of the weights of linear layers, and of the copies that would be made of them."""
    own, copies = {}, {}
    for weight in (step.weight for step in program.steps if isinstance(step, _Linear)):
        key = weight.data.data_ptr()
        own[key] = weight.data.nbytes
        if narrows(weight):
            copies[key] = (GROUP + 2) * weight.data.nbytes * 8 // (FORMATS[weight.storage].bits * GROUP)
    return sum(own.values()), sum(copies.values())
