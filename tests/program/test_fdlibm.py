"""The logarithm in float64: right to the last place, and the same bits everywhere."""

from __future__ import annotations

import hashlib

import numpy as np

from detgen.program.fdlibm import logarithm

R = np.random.default_rng(0)
POSITIVE = np.concatenate([R.random(20_000), 2.0 ** R.uniform(-1000, 1000, 20_000), 1 - R.random(5_000) * 1e-8, [1.0]])


def test_it_is_right() -> None:
    found = logarithm(POSITIVE)
    assert (np.abs(found - np.log(POSITIVE)) <= 1.01 * np.spacing(np.abs(found))).all()


def test_it_has_the_same_bits_everywhere() -> None:
    """Only operations that IEEE 754 defines: whatever the machine, this is what comes out."""
    grid = np.arange(1, 100_000, dtype=np.float64) / 4096
    assert hashlib.sha256(logarithm(grid).tobytes()).hexdigest()[:16] == "e9cf997d117e8e18"
