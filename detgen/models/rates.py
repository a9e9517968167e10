"""Rates at which states are left: exponentials, negated, of what checkpoints have."""

from __future__ import annotations

import numpy as np

from detgen.program.arrays import array, import_torch, tensor

_FINEST = 2.0**-25  # what moves an exponential by less than it is rounded
_STEPS = 4


def negative_powers(exponents: np.ndarray) -> np.ndarray:
    """-e^x, float32, as docs/numerics.md states the exponential."""
    import_torch()
    from detgen.program.arithmetic import exponential

    return array(-exponential(tensor(exponents)))


def logarithms(rates: np.ndarray) -> np.ndarray:
    """Numbers of which the rates are the exponentials, negated; those next to them where there are none.

    The exponential is that of docs/numerics.md, so that what is computed of the model has the rates of the file.
    """
    with np.errstate(all="ignore"):  # of what is not below 0, which is told where damage is
        near = np.log(-rates.astype(np.float64)).astype(np.float32)
        apart = np.maximum(np.spacing(np.abs(near)), np.float32(_FINEST))
        found = near.copy()
        for i in sorted(range(-_STEPS, _STEPS + 1), key=abs, reverse=True):
            tried = near + i * apart
            found = np.where(negative_powers(tried) == rates, tried, found)
    return found
