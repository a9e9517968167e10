"""How the numbers of a GGUF file's tensors become what transformers' models take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_FINEST = 2.0**-25  # what moves an exponential by less than it is rounded
_STEPS = 4


class Change(NamedTuple):
    """What becomes of a tensor.

    Attributes:
        order: which of its rows comes first, second and so on; None leaves them.
        columns: which of its columns does, likewise.
        by: what is done to its numbers then, one of `CHANGES`; "" for nothing.
    """

    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    by: str = ""


def logarithms(rates: np.ndarray) -> np.ndarray:
    """Numbers of which the rates are the exponentials, negated; those next to them where there are none.

    The exponential is that of docs/numerics.md, so that what is computed of the model has the rates of the file.
    """
    from detgen.models.step_parts import negative_powers

    with np.errstate(all="ignore"):  # of what is not below 0, which is told where damage is
        near = np.log(-rates.astype(np.float64)).astype(np.float32)
        apart = np.maximum(np.spacing(np.abs(near)), np.float32(_FINEST))
        found = near.copy()
        for i in sorted(range(-_STEPS, _STEPS + 1), key=abs, reverse=True):
            tried = near + i * apart
            found = np.where(negative_powers(tried) == rates, tried, found)
    return found


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "less one": lambda x: x - 1,
    "logarithms": logarithms,
    "taps": lambda x: x[:, None],
}
NAMES = {change: name for name, change in CHANGES.items()}
