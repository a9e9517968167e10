"""The filters of sampling, top_k, top_p and min_p, in plain numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.program.fdlibm import exponential, logarithm

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choice

_FIRST = 1024  # entries of a row that are sorted for top_p; all, if these have less of the probability


def scaled(logits: np.ndarray, peaks: np.ndarray | np.floating[Any], temperature: float | np.ndarray) -> np.ndarray:
    """(Logits - peak) / temperature, float64."""
    quotients: np.ndarray = (logits.astype(np.float64) - peaks) / np.maximum(temperature, 1e-200)  # nothing overflows
    return quotients


def floor_of(min_p: float) -> float:
    """The logarithm of min_p; -inf if there is none."""
    return float(logarithm(np.array(min_p))) if min_p else -math.inf


def kept(row: np.ndarray, choice: Choice) -> np.ndarray:
    """Ids, int64 [n] ascending, of what the filters keep of one row.

    Args:
        row: float32 or float64 [vocabulary] logits, adjusted, the largest of them finite.
        choice: the row's, with a temperature above 0.
    """
    vocabulary, peak = len(row), row.max()
    width = min(choice.top_k or vocabulary, vocabulary)
    floor = floor_of(choice.min_p)
    if width == vocabulary and choice.top_p == 1:
        return np.flatnonzero(scaled(row, peak, choice.temperature) >= floor)
    count, last = _boundary(row, peak, width, choice)
    ids = np.flatnonzero(row >= last)
    logits = row[ids]
    passing = scaled(logits, peak, choice.temperature) >= floor
    if len(ids) > count:  # of ties with the last one, those with the lowest ids stay
        passing[np.flatnonzero(logits == last)[count - len(ids) :]] = False
    return ids[passing]


def _boundary(
    row: np.ndarray, peak: np.floating[Any], width: int, choice: Choice, most: int = _FIRST
) -> tuple[int, np.floating[Any]]:
    """How many of the `width` best logits have less than top_p of their probability before them, and the last of them.

    Args:
        row: [vocabulary].
        peak: the largest entry.
        width: how many entries top_k keeps.
        choice: has the temperature and top_p.
        most: entries that are sorted first when top_k is off; all, if these have less of the probability.
    """
    vocabulary = len(row)
    if choice.top_p == 1:
        return width, np.partition(row, -width)[-width]
    count = width if width < vocabulary else min(width, most)
    most_likely = row if count == vocabulary else np.partition(row, -count)[-count:]
    top = np.sort(most_likely)[::-1]
    share = exponential(scaled(top, peak, choice.temperature))
    all_shares = share if width < vocabulary else exponential(scaled(row, peak, choice.temperature))
    total = np.cumsum(all_shares)[-1]  # one by one, where a sum would take its own order
    kept = 1 + int((np.cumsum(share[:-1]) < choice.top_p * total).sum())
    if kept == count < width:
        return _boundary(row, peak, width, choice, vocabulary)
    return kept, top[kept - 1]
