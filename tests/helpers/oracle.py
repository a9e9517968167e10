"""Passes of an engine, compared with the interpreter's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from detgen.kernels.c.library import BUILDS, Runner, build
from detgen.program.arrays import Array, array
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Buffer, Step
from detgen.program.rows import Rows, Take
from helpers.steps import Case, differences
from helpers.threads import using

Passes = list[tuple[type[Step], int]]  # the last step of each pass, and its rows


@contextmanager
def comparing() -> Iterator[Passes]:
    """Within it, every build leaves of each pass what the interpreter leaves: results, caches, broken rows."""
    plain: Callable[..., np.ndarray] = Runner.run
    libraries = {name: library for name in BUILDS if (library := build(name)) is not None}
    passes: Passes = []

    def run(
        self: Runner, rows: Rows, given: dict[Buffer, Array], take: Take | None = None, *, exact: bool = False
    ) -> Any:
        case = Case(self.program, {buffer: array(x) for buffer, x in given.items()}, rows)
        with using(1):  # more would wait for each other
            wanted = case.after(Interpreter(self.program).run)
            for name, library in libraries.items():
                found = case.after(partial(plain, Runner(library, self.program)))
                assert not differences(found, wanted), f"{name}, {len(rows.ids)} rows:\n{self.program}"
        passes.append((type(self.program.steps[-1]), len(rows.ids)))
        return plain(self, rows, given, take, exact=exact)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", run)
        yield passes


@pytest.fixture
def compared() -> Iterator[Passes]:
    """Passes are compared while a test runs."""
    with comparing() as passes:
        yield passes
