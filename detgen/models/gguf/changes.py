"""Changes that turn the numbers of a GGUF file's tensors into those of transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from detgen.models.rates import logarithms


class Change(NamedTuple):
    """The change of a tensor.

    Attributes:
        order: source row of each row; None leaves the rows.
        columns: source column of each column; None leaves the columns.
        by: name in `CHANGES` of the change of its numbers; None leaves them.
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
