"""The filters of sampling, top_k, top_p and min_p, in plain numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from detgen.kernels.exact import exponential, logarithm

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choice

_FIRST = 1024  # entries of a row that are sorted for top_p; all, if these have less of the probability


def scaled(logits: np.ndarray, peaks: np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
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
    return kept_rows(row[None], row.max()[None, None], choice)[1]


def kept_rows(rows: np.ndarray, peaks: np.ndarray, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """The same of rows with equal parameters: rows and ids of what is kept, int64 [n] each, ascending.

    Args:
        rows: float32 or float64 [rows, vocabulary].
        peaks: the largest of each, [rows, 1].
        choice: has the rows' parameters.
    """
    vocabulary = rows.shape[1]
    width = min(choice.top_k or vocabulary, vocabulary)
    floor = floor_of(choice.min_p)
    if width == vocabulary and choice.top_p == 1:
        at, ids = np.nonzero(scaled(rows, peaks, choice.temperature) >= floor)
        return at, ids
    counts, last = _boundaries(rows, peaks, width, choice)
    at, ids = np.nonzero(rows >= last)
    logits = rows[at, ids]
    passing = scaled(logits, peaks[at, 0], choice.temperature) >= floor
    held = np.bincount(at, minlength=len(rows))
    for row in np.flatnonzero(held > counts).tolist():
        own = slice(*np.searchsorted(at, [row, row + 1]).tolist())
        tied = np.flatnonzero(logits[own] == last[row]) + own.start
        passing[tied[counts[row] - held[row] :]] = False
    return at[passing], ids[passing]


def _boundaries(
    rows: np.ndarray, peaks: np.ndarray, width: int, choice: Choice, most: int = _FIRST
) -> tuple[np.ndarray, np.ndarray]:
    """How many of the `width` best logits have less than top_p of their probability before them, and the last of them.

    Args:
        rows: float32 [rows, vocabulary].
        peaks: float32 [rows, 1].
        width: how many entries top_k keeps.
        choice: has the temperature and top_p.
        most: entries that are sorted first when top_k is off; all, if these have less of the probability.

    Returns:
        int64 [rows] and float32 [rows, 1].
    """
    vocabulary = rows.shape[1]
    if choice.top_p == 1:
        return np.full(len(rows), width), np.partition(rows, -width, axis=1)[:, -width, None]
    count = width if width < vocabulary else min(width, most)
    most_likely = rows if count == vocabulary else np.partition(rows, -count, axis=1)[:, -count:]
    top = np.ascontiguousarray(np.sort(most_likely, axis=1)[:, ::-1])
    share = exponential(scaled(top, peaks, choice.temperature))
    all_shares = share if width < vocabulary else exponential(scaled(rows, peaks, choice.temperature))
    total = np.cumsum(all_shares, axis=1)[:, -1:]  # one by one, where a sum would take its own order
    kept = 1 + (np.cumsum(share[:, :-1], axis=1) < choice.top_p * total).sum(1)
    last = top[np.arange(len(rows)), kept - 1, None]
    short = kept == count
    if count < width and short.any():
        kept[short], last[short] = _boundaries(rows[short], peaks[short], width, choice, vocabulary)
    return kept, last
