"""Decay rates of states: negated exponentials of the numbers in checkpoints."""

from __future__ import annotations

import numpy as np

from detgen.program.arrays import array, import_torch, tensor

_FINEST = 2.0**-25  # a smaller change does not change the rounded exponential
_STEPS = 4


def negative_powers(exponents: np.ndarray) -> np.ndarray:
    """Return -e^x, float32, with the exponential of docs/numerics.md."""
    import_torch()
    from detgen.program.arithmetic import exponential

    return array(-exponential(tensor(exponents)))


def logarithms(rates: np.ndarray) -> np.ndarray:
    """Return numbers whose negated exponentials are the rates, or are closest to them.

    The exponential is that of docs/numerics.md, so that the model computes with the rates of the file.
    """
    with np.errstate(all="ignore"):  # for rates that are not below 0; damage is reported elsewhere
        near = np.log(-rates.astype(np.float64)).astype(np.float32)
        apart = np.maximum(np.spacing(np.abs(near)), np.float32(_FINEST))
        found = near.copy()
        for i in sorted(range(-_STEPS, _STEPS + 1), key=abs, reverse=True):
            tried = near + i * apart
            found = np.where(negative_powers(tried) == rates, tried, found)
    return found
