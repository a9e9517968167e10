"""Detgen's kernels against its compiled library: each step at the shapes of a model has the same bits on the device."""

from __future__ import annotations

import torch

from detgen.kernels.bits import same_bits
from detgen.kernels.c.library import Runner, best_build
from detgen.kernels.triton.runner import TritonRunner
from detgen.program.operands import Step
from detgen.program.program import Program
from gpu.notebook import Asked, Notebook
from gpu.steps import Made, made, on, rows_of


def measure(book: Notebook, asked: Asked) -> None:
    """Compare step after step, of few rows and of many."""
    torch.set_grad_enabled(False)
    positions = 70 if asked.tiny else 1100
    for one in made(asked, positions):
        for count in (3,) if asked.tiny else (1, 5, 130):
            with book.part(f"{one.name}, {count} rows"):
                compare(book, one, count, positions, asked.device)


def compare(book: Notebook, one: Made, count: int, positions: int, device: str) -> None:
    """Run a step by both, and note whether its results have the same bits."""
    rows, maker = rows_of(count, positions), torch.Generator().manual_seed(count)
    buffers = {b: torch.randn(count, b.width, generator=maker).abs() for b in {*one.step.reads, one.step.writes}}
    moved = on(device, one.step)
    theirs = {b: x.clone().to(device) for b, x in buffers.items()}
    TritonRunner(_program(moved, theirs)).run(rows.to(device), theirs)
    library = best_build()
    assert library is not None, "the compiled library is missing"
    Runner(library, _program(one.step, buffers)).run(rows, buffers)
    pairs = [(theirs[b].cpu(), x) for b, x in buffers.items()]
    if one.writes:
        pairs += [(moved.cache.keys.cpu(), one.step.cache.keys), (moved.cache.kept.cpu(), one.step.cache.kept)]  # type: ignore[attr-defined]
    different = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
    equal = all(same_bits(a, b) for a, b in pairs)
    said = "the same bits" if equal else f"OTHER BITS, {different} of {sum(a.numel() for a, _ in pairs)} numbers"
    book.note(
        f"{one.name}, {count} rows", {"equal": equal, "different": different}, f"{one.name}, {count} rows: {said}"
    )
    assert equal, said


def _program(step: Step, given: dict) -> Program:  # type: ignore[type-arg]
    program = Program(*given)
    program.add(step)
    return program
