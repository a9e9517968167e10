"""Triton's interpreter, made to round as a GPU does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def _fused() -> Iterator[None]:
    """A fused multiply-add of float32 rounds once. Before Triton 3.9 the interpreter rounds it twice."""
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" not in sys.modules:  # no test that was collected needs it
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_fma

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return plain(builder, x, y, z)
        import torch

        from detgen.program.arithmetic import fma

        factors = (torch.from_numpy(np.array(handle.data)) for handle in (x, y, z))
        return TensorHandle(fma(*factors).numpy(), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_fma", create_fma)
        yield
