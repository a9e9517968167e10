"""Detgen's kernels against its compiled library: its self-test, and each step at the shapes of a model."""

from __future__ import annotations

import torch

from detgen.kernels.triton.self_test import different, differing, rows_of
from gpu.notebook import Asked, Notebook
from gpu.steps import Made, made


def measure(book: Notebook, asked: Asked) -> None:
    """The self-test, then step after step, of few rows and of many."""
    torch.set_grad_enabled(False)
    if not asked.tiny:  # in the interpreter a test runs it
        with book.part("self-test"):
            found = different(asked.device)
            book.note("self-test", {"equal": not found, "different": len(found)}, f"self-test: {found or 'passed'}")
            assert not found, "other bits"
    positions = 70 if asked.tiny else 1100
    for one in made(asked, positions):
        for count in (3,) if asked.tiny else (1, 5, 130):
            with book.part(f"{one.name}, {count} rows"):
                compare(book, one, count, positions, asked.device)


def compare(book: Notebook, one: Made, count: int, positions: int, device: str) -> None:
    """Run a step by both, and note whether its results have the same bits."""
    rows, maker = rows_of(count, positions), torch.Generator().manual_seed(count)
    buffers = {b: torch.randn(count, b.width, generator=maker).abs() for b in {*one.step.reads, one.step.writes}}
    different, numbers = differing((one.step,), rows, buffers, device)
    said = f"OTHER BITS, {different} of {numbers} numbers" if different else "the same bits"
    book.note(
        f"{one.name}, {count} rows",
        {"equal": not different, "different": different},
        f"{one.name}, {count} rows: {said}",
    )
    assert not different, said
