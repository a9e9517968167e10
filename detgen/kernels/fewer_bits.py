"""The weights of linear layers a second time, in 8 bits: by these a model drafts for itself.

What a pass computes by them is never committed, so its bits are no part of any promise.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from detgen.kernels.c.layout import Narrowing
from detgen.kernels.c.library import best_build
from detgen.program import steps
from detgen.program.experts import ExpertLinear
from detgen.program.operands import GROUP, PANEL, Scales, Step, Weight
from detgen.program.program import Program
from detgen.program.storage import FORMATS, Storage

_Linear = steps.Linear | steps.ScoredLinear | ExpertLinear


class FewerBits:
    """Copies of weights in 8 bits, each made when it is first asked for."""

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
            self._made[key] = weight, in_eight_bits(weight)
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


def in_eight_bits(weight: Weight) -> Weight:
    """A weight that narrows in 8 bits, with a float16 scale for each group of inputs, whose largest one becomes 127."""
    made, *shape = FORMATS[Storage.BYTE], *weight.data.shape[:-2]
    source = weight.data.cpu()
    data = torch.empty(*shape, weight.inputs // made.together, made.together * PANEL, dtype=torch.uint8)
    scales = torch.empty(*shape, weight.inputs // GROUP, PANEL, dtype=torch.float16)
    sizes = torch.get_num_threads(), weight.storage, math.prod(shape), weight.inputs
    best_build().narrow(Narrowing(*sizes, source.data_ptr(), data.data_ptr(), scales.data_ptr()))
    scales = scales.to(weight.data.device)
    return replace(
        weight,
        data=data.to(weight.data.device),
        scales=Scales(steps=scales, storage=Storage.HALF),
        codes=None,
        storage=Storage.BYTE,
    )
