"""Detgen's kernels against its compiled library: its self-test, and each step at the shapes of a model."""

from __future__ import annotations

import time

import torch

from detgen.kernels.triton.self_test import checks, differing, rows_of
from gpu.notebook import Asked, Notebook
from gpu.steps import Made, made


def measure(book: Notebook, asked: Asked) -> None:
    """The self-test, then step after step, of few rows and of many."""
    torch.set_grad_enabled(False)
    if not asked.tiny:  # in the interpreter a test runs it
        started = time.perf_counter()
        for name, right in checks(asked.device):
            with book.part(f"self-test: {name}"):
                assert right(), "other bits"
        found = {"equal": not book.failed, "seconds": time.perf_counter() - started}
        said = f"{len(book.failed)} of its parts failed" if book.failed else "passed"
        book.note("self-test", found, f"self-test: {said}, {found['seconds']:.0f} s")
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
