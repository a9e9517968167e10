"""How the numbers of a GGUF file's tensors become what transformers' models take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from detgen.models.rates import logarithms


class Change(NamedTuple):
    """What becomes of a tensor.

    Attributes:
        order: which of its rows comes first, second and so on; None leaves them.
        columns: which of its columns does, likewise.
        by: which of `CHANGES` makes its numbers what the model takes; None leaves them.
    """

    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    by: str | None = None


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "less one": lambda x: x - 1,
    "logarithm": logarithms,
    "turned": lambda x: x.T,
    "flat": np.ravel,
    "in one row": np.atleast_2d,
    "flat logarithm": lambda x: logarithms(x).ravel(),
    "in rows of one": lambda x: x[:, None],
}
