"""Keep stored numbers finite, so that a masked entry adds nothing: 0 x NaN is NaN, 0 x 1e18 is 0.

Promise: an entry within the bounds keeps its bits; any other is replaced by a function of that entry alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from detgen.program.operands import name_of

if TYPE_CHECKING:
    import torch

_MOST = 1e18  # products of two such entries, added up over a head, are far from overflowing float32


def most(dtype: str) -> float:
    """Return the bound of a number format, given its name: 1e18, or its largest number."""
    return min(_MOST, float(ml_dtypes.finfo(dtype).max))


def bounded(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x in which NaN is 0 and everything else, infinities too, is clamped to the bounds."""
    limit = most(name_of(x.dtype))
    return x.nan_to_num(0.0, limit, -limit).clamp_(-limit, limit)


def bounded_array(x: np.ndarray) -> np.ndarray:
    """Like `bounded`, for an array in float32."""
    limit = most("float32")
    found: np.ndarray = np.nan_to_num(x, nan=0.0, posinf=limit, neginf=-limit).clip(-limit, limit)
    return found
