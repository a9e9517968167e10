"""Exponential and logarithm in float64: right to the last place, and the same bits everywhere."""

from __future__ import annotations

import hashlib

import numpy as np

from detgen.program.fdlibm import exponential, logarithm

R = np.random.default_rng(0)
POSITIVE = np.concatenate([R.random(20_000), 2.0 ** R.uniform(-1000, 1000, 20_000), 1 - R.random(5_000) * 1e-8, [1.0]])
ANY = np.concatenate([R.uniform(-745, 700, 20_000), R.uniform(-1, 1, 20_000), [0.0, -0.0, -745.1, -746.0, -1e9]])


def test_they_are_right() -> None:
    found = logarithm(POSITIVE)
    assert (np.abs(found - np.log(POSITIVE)) <= 1.01 * np.spacing(np.abs(found))).all()
    found = exponential(ANY)
    assert (np.abs(found - np.exp(ANY)) <= 1.01 * np.spacing(found)).all()
    assert exponential(ANY)[-1] == 0


def test_they_are_the_same_bits_everywhere() -> None:
    """Only operations that IEEE 754 defines: whatever the machine, this is what comes out."""
    grid = np.arange(1, 100_000, dtype=np.float64) / 4096
    for function, digest in ((logarithm, "e9cf997d117e8e18"), (lambda x: exponential(-x), "9ad7c90a0c2b3bb6")):
        assert hashlib.sha256(function(grid).tobytes()).hexdigest()[:16] == digest
