"""Sampling in plain numpy, of the few rows that have more candidates than C has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from detgen.kernels.filters import kept, scaled
from detgen.kernels.noise import gumbel, words

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choice


def sample_plain(row: np.ndarray, choice: Choice) -> tuple[int, float]:
    """The best entry of a row's scores, and its lead.

    Args:
        row: float32 [vocabulary].
        choice: with a temperature above 0.
    """
    peak = row.max()
    if not np.isfinite(peak):
        return int(row.argmax()), np.inf
    ids = kept(row, choice)
    score = scaled(row[ids], peak, choice.temperature) + gumbel(words_of(choice, ids))
    first, ahead = leading(score, np.zeros(1, np.int64), np.array([len(ids)]))
    return int(ids[first[0]]), float(ahead[0])


def leading(score: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The place of the best score of each group, the first of ties, and its lead over the others of the group.

    Args:
        score: float64 [n], the groups one after another; overwritten.
        starts: where each group begins.
        counts: how many scores each group has, at least one.
    """
    top = np.maximum.reduceat(score, starts)
    first = np.flatnonzero(score == np.repeat(top, counts))
    first = first[np.searchsorted(first, starts)]
    score[first] = -np.inf
    return first, top - np.maximum.reduceat(score, starts)


def words_of(choice: Choice, ids: np.ndarray) -> np.ndarray:
    """The random words of a row's entries; see `words`."""
    return words(choice.seed, choice.sample, choice.position, ids)
