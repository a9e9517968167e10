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
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if hasattr(interpreter._interpreter, "fma_fp32"):
        yield
        return
    plain = InterpreterBuilder.create_fma

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return plain(builder, x, y, z)
        return TensorHandle(_rounded_once(x.data, y.data, z.data), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_fma", create_fma)
        yield


def _rounded_once(x: Any, y: Any, z: Any) -> Any:
    """x * y + z, float32; as `reference.fma`, by numpy, since recorded work is not to see other tensors."""
    product, addend = np.broadcast_arrays(x.astype(np.float64) * y, z.astype(np.float64))
    total = product + addend
    virtual = total - product
    rest = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    inexact = (rest != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)
