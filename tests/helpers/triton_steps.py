"""Steps by kernels in Triton, and by the program's interpreter: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from detgen.kernels.triton.runner import TritonRunner
from detgen.program.arrays import Array, each, same_bits, tensor
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Buffer, Step
from detgen.program.program import Program
from detgen.program.rows import Rows

NONE = torch.zeros(0, 4, dtype=torch.int64)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Of several magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g))


def on(device: str, step: Step) -> Any:
    """A step with its numbers in tensors on a device."""
    return each(step, lambda x: tensor(x).to(device))


def rows_of(count: int, wanted: torch.Tensor | None = None) -> Rows:
    along = torch.arange(count)
    return Rows(along, along, along, along.flip(0) if wanted is None else wanted, NONE, NONE)


def both(
    device: str, rows: Rows, buffers: Mapping[Buffer, Array], *made: Step
) -> dict[Buffer, tuple[torch.Tensor, torch.Tensor]]:
    """What both leave in the buffers that are given: Triton, and the interpreter."""
    program, other = Program(*buffers), Program(*buffers)
    for step in made:
        program.add(step)
        other.add(on(device, step))
    theirs = {b: tensor(x).clone().to(device) for b, x in buffers.items()}
    broken = Interpreter(program).run(rows, buffers)
    found = TritonRunner(other).run(rows.to(device), theirs)
    assert found.bool().cpu().equal(broken)
    return {buffer: (theirs[buffer].cpu(), tensor(x)) for buffer, x in buffers.items()}


def alike(device: str, rows: Rows, buffers: Mapping[Buffer, Array], *made: Step) -> dict[Buffer, torch.Tensor]:
    """The same, which have the same bits; whichever NaN is as good as another."""
    found = both(device, rows, buffers, *made)
    for buffer, (one, other) in found.items():
        assert same_bits(*(x.where(x == x, torch.nan) for x in (one, other))), buffer
    return {buffer: one for buffer, (one, _) in found.items()}


storages = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
