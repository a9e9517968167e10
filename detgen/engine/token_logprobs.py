"""Log-probabilities of the chosen and of the most likely tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detgen.engine.request import TokenLogprobs


def token_logprobs(logprobs: np.ndarray, chosen: Sequence[float] | np.ndarray, wanted: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the most likely ones.

    Args:
        logprobs: float32 [rows, vocabulary].
        chosen: log-probability of each row's chosen token.
        wanted: how many of the most likely tokens; ties are ordered by id.
    """
    tops = _most_likely(logprobs, min(wanted, logprobs.shape[1]))
    return [TokenLogprobs(own, top) for own, top in zip(np.asarray(chosen).tolist(), tops, strict=True)]


def _most_likely(values: np.ndarray, wanted: int) -> list[tuple[tuple[int, float], ...]]:
    """Id and value of the `wanted` largest entries of each row, largest first."""
    rows, vocabulary = values.shape
    if not wanted:
        return [()] * rows
    last = np.partition(values, -wanted, axis=1)[:, -wanted, None]
    # More than wanted if some are equal to the last; all of them if a broken model gives NaN.
    found = np.flatnonzero(~(values < last))
    likely = values.ravel()[found]
    at = found // vocabulary
    order = np.lexsort((-likely, at))
    best = order[np.searchsorted(at, np.arange(rows))[:, None] + np.arange(wanted)]
    ids, likely = (found[best] % vocabulary).tolist(), likely[best].tolist()
    return [tuple(zip(*row, strict=True)) for row in zip(ids, likely, strict=True)]
