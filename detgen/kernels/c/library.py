"""Runs a program with the build of pass.c for this processor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c import layout
from detgen.kernels.c.layout import Chain, LaidOut, Pass
from detgen.kernels.c.threads import threads
from detgen.kernels.input_batch import Ends
from detgen.program.arrays import Array, array
from detgen.program.experts import ExpertLinear, Sort
from detgen.program.finite import most
from detgen.program.operands import SCORED, Buffer, address, is_contiguous, name_of
from detgen.program.program import Program
from detgen.program.rows import Rows, Take
from detgen.program.states import Convolve, Recurrence
from detgen.program.widening import widened

BUILDS = ("bf16", "vnni", "avx512", "avxvnni", "avx2", "dotprod", "plain")  # the fastest first
CHOICE = "DETGEN_BUILD"  # environment variable that selects a build, to compare bits


REINSTALL = "reinstall detgen (pip install --force-reinstall --no-deps, with the name or folder that it came from)"


@cache
def build(name: str) -> ctypes.CDLL | None:
    """Load a build by name; None if it is missing, of another version, or not for this processor."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_{name}{suffix}"
        if not path.is_file():
            continue
        try:
            found = ctypes.CDLL(str(path))
            digest, runs = found.layout(), found.runs_here()
        except (OSError, AttributeError):  # built for another system, another OpenMP or by an older version
            continue
        if digest == layout.DIGEST and runs:
            found.run_pass.argtypes = [ctypes.POINTER(layout.Program), ctypes.POINTER(Pass)]
            found.run_chain.argtypes = [*found.run_pass.argtypes, ctypes.POINTER(Chain)]
            found.best.argtypes = [ctypes.POINTER(layout.Best)]
            found.mask.argtypes = [ctypes.POINTER(layout.Masked)]
            found.judge.argtypes = [ctypes.POINTER(layout.Judged)]
            found.ranked.argtypes = [ctypes.POINTER(layout.Ranked)]
            found.draws.argtypes = [ctypes.POINTER(layout.Draws)]
            found.quantize.argtypes = [ctypes.POINTER(layout.Quantization)]
            found.arrange.argtypes = [ctypes.POINTER(layout.Arrangement)]
            return found
    return None


def best_build() -> ctypes.CDLL:
    """Return the build that `DETGEN_BUILD` names, else the fastest one for this processor.

    Raises:
        EngineError: if `DETGEN_BUILD` names no build, or one that this processor cannot run; or if no build can be
            loaded.
    """
    if asked := os.environ.get(CHOICE):
        if asked not in BUILDS:
            raise EngineError(f"{CHOICE} is {asked!r}; choose one of {', '.join(BUILDS)}, or leave it unset")
        if (found := build(asked)) is None:
            raise EngineError(f"{CHOICE} is {asked}, which this processor cannot run or which was not built; unset it")
        return found
    for name in BUILDS:
        if (found := build(name)) is not None:
            return found
    raise EngineError(f"detgen's compiled library is missing, or not of this version or for this system: {REINSTALL}")


class Runner:
    """Runs a program.

    Args:
        found: the build that runs it.
        program: the steps; later additions are ignored.

    Attributes:
        program: as given.
    """

    def __init__(self, found: ctypes.CDLL, program: Program) -> None:
        self.program = program
        self._library, self._laid_out = found, LaidOut(program)

    def run(
        self, rows: Rows, given: Mapping[Buffer, Array], take: Take | None = None, *, exact: bool = False
    ) -> np.ndarray:
        """Run a pass on `threads` threads; returns the same as `Interpreter.run`.

        Args:
            rows: as for `Interpreter.run`.
            given: as for `Interpreter.run`.
            take: as for `Interpreter.run`.
            exact: whether to skip the rounding of inputs, which is slow.

        Raises:
            MemoryError: if there is no memory for the buffers.
        """
        count = len(rows.ids)
        if take is None and not exact:
            return self._run(self._laid_out.whole, rows, given)
        broken = np.zeros(count, bool)
        all_given = {b: np.zeros((count, b.width), np.float32) for b in self.program.buffers} | dict(given)
        sort = -1
        for i, step in enumerate(self.program.steps):
            sort = i if isinstance(step, Sort) else sort
            # The rows of experts are known only while a program runs.
            chosen = (sort, i) if isinstance(step, ExpertLinear) else (i,)
            part = self._widened(*chosen) if exact else self._laid_out.part(*chosen)
            broken |= self._run(part, rows, all_given)
            if take is not None:
                take(step.name, all_given[step.writes][: len(rows.wanted) if step.wanted else count])
        return broken

    def _widened(self, *chosen: int) -> layout.Program:
        """Return some of the steps, `widened`."""
        made = Program(*self.program.buffers)
        made.steps = [widened(self.program.steps[i]) for i in chosen]
        return LaidOut(made).whole

    def chain(
        self, rows: Rows, slots: np.ndarray, lengths: np.ndarray, ends: Ends | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run consecutive passes; in each, sequences continue with the largest logit of the pass before.

        Args:
            rows: of the first pass; one row per sequence is wanted, in the order of the sequences.
            slots: int64 [sequences], the slots of the sequences.
            lengths: int64 [sequences], passes that each takes part in, at least 1; lowered where a result is not
                finite, and where a sequence ends.
            ends: where sequences end; None for nowhere.

        Returns:
            The SCORED numbers of the rows, float32 [sequences, passes, SCORED], and whether a key of the last layer is
            not finite, bool [sequences, passes]; arbitrary where a sequence takes no part.

        Raises:
            MemoryError: if there is no memory for the buffers.
        """
        scores = np.zeros((len(slots), int(lengths.max()), SCORED), np.float32)
        return scores, self._chain(rows, slots, lengths, ends, Chain(results=scores.ctypes.data))

    def draft(
        self,
        rows: Rows,
        slots: np.ndarray,
        lengths: np.ndarray,
        draws: layout.Draws,
        ends: Ends | None = None,
        logits: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run consecutive passes; in each, sequences continue with what their sampling is likely to choose.

        Args:
            rows: as for `chain`.
            slots: as for `chain`.
            lengths: as for `chain`; also lowered where the choice cannot be known.
            draws: how the sequences' first tokens are sampled; see `choosing.draws`.
            ends: as for `chain`.
            logits: takes the rows' logits, float32 [sequences, passes, vocabulary]; None to discard them.

        Returns:
            The tokens, int64 [sequences, passes], -1 where the choice cannot be known, or a sequence takes no part; and
            which keys are not finite, as for `chain`.

        Raises:
            MemoryError: if there is no memory for the buffers.
        """
        tokens = np.full((len(slots), int(lengths.max())), -1, np.int64)
        chain = Chain(tokens=tokens.ctypes.data, results=None if logits is None else logits.ctypes.data)
        chain.draws = ctypes.addressof(draws)
        return tokens, self._chain(rows, slots, lengths, ends, chain)

    def _chain(self, rows: Rows, slots: np.ndarray, lengths: np.ndarray, ends: Ends | None, chain: Chain) -> np.ndarray:
        """Run a chain; return whether keys of the last layer are not finite, bool [sequences, passes]."""
        assert rows.spans is None or not chain.draws, "states cannot be set back where a row read what does not stand"
        chain.steps = int(lengths.max())
        broken = np.zeros((len(slots), chain.steps), bool)
        chain.slots, chain.lengths, chain.broken = map(address, (slots, lengths, broken))
        if ends is not None:
            chain.ending = len(ends.tokens)
            chain.ends, chain.to_end = address(ends.tokens), address(ends.to_end)
        first = np.zeros(len(rows.ids), bool)
        addresses = (ctypes.c_void_p * len(self.program.buffers))()
        task = self._task(rows, addresses, first)
        if self._library.run_chain(self._laid_out.whole, task, chain):
            raise MemoryError(f"no memory for a pass of {task.rows} rows")
        broken[:, 0] = first[array(rows.wanted)]
        return broken

    def alone(self, step: int, x: np.ndarray, rows: Rows) -> np.ndarray:
        """Run one step on x, float32 [rows, width]; return its results. Arguments as for `run`."""
        made = self.program.steps[step]
        out = np.zeros((len(x), made.writes.width), np.float32)
        self._run(self._laid_out.part(step), rows, {made.reads[0]: x, made.writes: out})
        return out

    def _run(self, program: layout.Program, rows: Rows, given: Mapping[Buffer, Array]) -> np.ndarray:
        broken = np.zeros(len(rows.ids), bool)
        addresses = (ctypes.c_void_p * len(self.program.buffers))()
        for buffer, x in given.items():
            assert name_of(x.dtype) == "float32"
            assert is_contiguous(x)
            assert x.shape[1] == buffer.width
            addresses[self.program.buffers[buffer]] = address(x)
        task = self._task(rows, addresses, broken)
        if self._library.run_pass(program, task):
            raise MemoryError(f"no memory for a pass of {task.rows} rows")
        return broken

    def _task(self, rows: Rows, addresses: ctypes.Array[ctypes.c_void_p], broken: np.ndarray) -> Pass:
        """Return the pass in the form that the library takes."""
        stateful = any(isinstance(step, Convolve | Recurrence) for step in self.program.steps)
        assert rows.spans is not None or not stateful, "layers that keep states are told of the spans of a pass"
        return Pass(
            *(threads(), len(rows.ids), len(rows.wanted), len(rows.pieces), rows.tables.shape[1]),
            *map(address, (rows.ids, rows.positions, rows.places, rows.wanted, rows.pieces, rows.tables)),
            *(ctypes.addressof(addresses), address(broken), most("float32")),
            *((0, None) if rows.spans is None else (len(rows.spans), address(rows.spans))),
        )
