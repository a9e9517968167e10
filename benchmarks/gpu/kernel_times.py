"""Times of detgen's kernels, step by step, and the least that their bytes and their products can take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from detgen.kernels.triton import linear
from detgen.kernels.triton.runner import TritonRunner
from detgen.kernels.triton.self_test import rows_of
from detgen.program.arrays import each, tensor
from detgen.program.program import Program
from gpu.ceilings import roof
from gpu.notebook import Asked, Notebook
from gpu.steps import Made, attention, made
from gpu.timing import seconds_each

_ROWS = (1, 16, 64, 128, 256)
_LONG = (8192, 32768)  # positions of a context
_TILES = (32, 64)  # rows, of which kernels have 16


def measure(book: Notebook, asked: Asked) -> None:
    """Each step, at several row counts."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth, rate = roof(asked, torch.float32)
    positions, rows = (70, (2,)) if asked.tiny else (1100, _ROWS)
    for one in made(asked, positions):
        _time(book, asked, one, rows, positions, bandwidth, rate)
        if one.name.endswith((", q8", ", q4")):
            for tall in _TILES:
                with _tiles(tall):
                    higher = one._replace(name=f"{one.name}, tiles of {tall} rows")
                    _time(book, asked, higher, rows[-1:], positions, bandwidth, rate)
    for positions in () if asked.tiny else _LONG:
        one = next(one for one in attention(asked, positions) if one.name == "attention")
        one = one._replace(name=f"attention, {positions:,} keys")
        _time(book, asked, one, rows[:2], positions, bandwidth, rate)


@contextmanager
def _tiles(rows: int) -> Iterator[None]:
    """Linear layers in tiles of so many rows: they read weights less often, and fewer warps are at work."""
    usual, linear._ROWS = linear._ROWS, rows
    try:
        yield
    finally:
        linear._ROWS = usual


def _time(
    book: Notebook, asked: Asked, one: Made, counts: tuple[int, ...], positions: int, bandwidth: float, rate: float
) -> None:
    step = each(one.step, lambda x: tensor(x).to(asked.device))
    for count in counts:
        with book.part(f"{one.name}, {count} rows"):
            rows = rows_of(count, positions).to(asked.device)
            given = {b: torch.randn(count, b.width, device=asked.device) for b in {*step.reads, step.writes}}
            program = Program(*given)
            program.add(step)
            runner = TritonRunner(program)
            seconds = seconds_each([lambda runner=runner, rows=rows, given=given: runner.run(rows, given)])
            floor = max(one.moved / bandwidth, one.operations * count / rate)
            found = {"seconds": seconds, "floor": floor, "bytes": one.moved, "operations": one.operations * count}
            line = f"{one.name}, {count} rows: {1e6 * seconds:.1f} us, at best {1e6 * floor:.1f}"
            book.note(f"{one.name}, {count} rows", found, line)
