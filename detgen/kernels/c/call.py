"""Steps as a function of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from detgen.kernels.c.layout import LaidOut, Pass
from detgen.kernels.c.library import best_build
from detgen.kernels.c.threads import threads
from detgen.program.finite import most
from detgen.program.operands import Buffer, address
from detgen.program.program import Program
from detgen.program.rows import Rows

# Called with what is read and what is written, float32 [rows, width] each, and the rows where they belong to a pass.
Watch = Callable[[list[torch.Tensor], list[torch.Tensor], Rows | None], None]
_watch: Watch | None = None


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Inside the block, pass each call to `watch`."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


class Call:
    """Steps that compute rows of some tensors from the same rows of others; one call at a time.

    Args:
        program: the steps.
        reads: buffers given by the caller.
        writes: buffers that it fills; it allocates any others itself.

    Raises:
        EngineError: if the compiled library cannot be loaded.
    """

    def __init__(self, program: Program, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        self._run, self._laid_out = best_build().run_pass, LaidOut(program)
        self._given = (ctypes.c_void_p * len(program.buffers))()
        self._pass = Pass(given=ctypes.addressof(self._given), most=most("float32"))
        self._arguments = ctypes.byref(self._laid_out.whole), ctypes.byref(self._pass)
        self._reads, self._writes = (
            [(program.buffers[buffer], buffer.width) for buffer in buffers] for buffers in (reads, writes)
        )

    def __call__(self, *xs: torch.Tensor, of: Rows | None = None) -> list[torch.Tensor]:
        """Run the steps by so many `threads`.

        Args:
            xs: inputs, float32 [rows, width] each.
            of: the rows of a pass, where steps need them.

        Returns:
            Results, float32 [rows, width] each.

        Raises:
            MemoryError: if there is no memory for intermediate buffers.
        """
        count, task = len(xs[0]), self._pass
        xs = tuple(x.contiguous() for x in xs)
        out = [torch.empty(count, width) for _, width in self._writes]
        for (number, width), x in zip(self._reads, xs, strict=True):
            assert x.dtype == torch.float32
            assert x.shape == (count, width)
            self._given[number] = x.data_ptr()
        for (number, _), x in zip(self._writes, out, strict=True):
            self._given[number] = x.data_ptr()
        task.threads, task.rows = threads(), count
        if of is not None:
            task.pieces, task.blocks = len(of.pieces), of.tables.shape[1]
            task.positions, task.places = address(of.positions), address(of.places)
            task.piece, task.tables = address(of.pieces), address(of.tables)
        if count and self._run(*self._arguments):
            raise MemoryError(f"no memory for {count} rows")
        if _watch is not None:
            _watch(list(xs), out, of)
        return out
