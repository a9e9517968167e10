"""Compares arrays, and tensors, bit for bit."""

from __future__ import annotations

import numpy as np

from detgen.program.arrays import Array, array

_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(x: Array) -> np.ndarray:
    """The memory as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    found = array(x)
    return np.ascontiguousarray(found).view(_BITS[found.itemsize]).reshape(found.shape)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two have the same shape, number format and bits."""
    mine, other = array(a), array(b)
    return mine.shape == other.shape and mine.dtype == other.dtype and np.array_equal(bits(mine), bits(other))
