"""detgen's kernels, step by step at the shapes of a model: their bits against those of its compiled library; their
times, and the least that their bytes and their products can take.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from detgen.kernels.triton.runner import TritonRunner
from detgen.kernels.triton.self_test import checks, differing, rows_of
from detgen.program.arrays import each, tensor
from detgen.program.program import Program
from gpu.ceilings import roof
from gpu.notebook import Asked, Notebook
from gpu.steps import Made, attention, made
from gpu.timing import device_seconds

_TIMED = (1, 16, 64, 128, 256)  # rows
_LONG = (8192, 32768)  # positions of a context


def measure(book: Notebook, asked: Asked) -> None:
    """Run the self-test and each step with few and with many rows on both sides; or measure times."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    positions = 70 if asked.tiny else 1100
    if asked.stage == "kernel-times":
        _measure_times(book, asked, positions)
        return
    if not asked.tiny:  # in the interpreter, a test runs it
        started = time.perf_counter()
        for name, right in checks(asked.device):
            with book.part(f"self-test: {name}"):
                assert right(), "other bits"
        found = {"equal": not book.failed, "seconds": time.perf_counter() - started}
        said = f"{len(book.failed)} of its parts failed" if book.failed else "passed"
        book.note("self-test", found, f"self-test: {said}, {found['seconds']:.0f} s")
    for one in made(asked, positions):
        for count in (3,) if asked.tiny else (1, 5, 130):
            with book.part(f"{one.name}, {count} rows"):
                compare(book, one, count, positions, asked.device)


def compare(book: Notebook, one: Made, count: int, positions: int, device: str) -> None:
    """Run a step on both sides, and record whether its results have the same bits."""
    rows, maker = rows_of(count, positions), torch.Generator().manual_seed(count)
    buffers = {b: torch.randn(count, b.width, generator=maker).abs() for b in {*one.step.reads, one.step.writes}}
    different, numbers = differing((one.step,), rows, buffers, device)
    book.compared(f"{one.name}, {count} rows", different, numbers, "the same bits")


def _measure_times(book: Notebook, asked: Asked, positions: int) -> None:
    bandwidth, rate = roof(asked, "float32")
    counts = (2,) if asked.tiny else _TIMED

    def time_step(one: Made, counts: tuple[int, ...], positions: int) -> None:
        step = each(one.step, lambda x: tensor(x).to(asked.device))
        for count in counts:
            name = f"{one.name}, {count} rows"
            with book.part(name):
                rows = rows_of(count, positions).to(asked.device)
                given = {b: torch.randn(count, b.width, device=asked.device) for b in {*step.reads, step.writes}}
                program = Program(*given)
                program.add(step)
                runner = TritonRunner(program)
                seconds = device_seconds(partial(runner.run, rows, given))
                floor = max(one.moved / bandwidth, one.operations * count / rate)
                found = {"seconds": seconds, "floor": floor, "bytes": one.moved, "operations": one.operations * count}
                book.note(name, found, f"{name}: {1e6 * seconds:.1f} us, at best {1e6 * floor:.1f}")

    for one in made(asked, positions):
        time_step(one, counts, positions)
    for long in () if asked.tiny else _LONG:
        one = next(one for one in attention(asked, long) if one.name == "attention")
        time_step(one._replace(name=f"attention, {long:,} keys"), counts[:2], long)
