"""The filters of sampling, top_k, top_p and min_p, in plain numpy, which also samples rows that C has no room for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.noise import gumbel, words
from detgen.program.arrays import import_torch
from detgen.program.fdlibm import logarithm

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choice


UNITS = 2.0**40  # of a share that is 1
COLDEST = 1e-30  # a lower temperature, whose inverse would leave float32, gives the shares of this one


def scaled(logits: np.ndarray, peaks: np.ndarray | np.floating[Any], temperature: float | np.ndarray) -> np.ndarray:
    """(Logits - peak) / temperature, float64."""
    quotients: np.ndarray = (logits.astype(np.float64) - peaks) / np.maximum(temperature, 1e-200)  # nothing overflows
    return quotients


def floor_of(min_p: float) -> float:
    """Return the logarithm of min_p; -inf if there is none."""
    return float(logarithm(np.array(min_p))) if min_p else -math.inf


def inverse_of(temperature: float | np.ndarray) -> np.ndarray:
    """What shares are made with, float32."""
    return (1 / np.maximum(temperature, COLDEST)).astype(np.float32)


def shares(logits: np.ndarray, peak: np.floating[Any], temperature: float) -> np.ndarray:
    """E^((logits - peak) / temperature) in units of 2^-40, int64: whole numbers, whose sums are exact in any order."""
    torch = import_torch()
    from detgen.program.arithmetic import exponential

    with np.errstate(over="ignore"):
        powers = (logits - peak).astype(np.float32) * inverse_of(temperature)
    found: np.ndarray = np.rint(exponential(torch.from_numpy(powers)).double().numpy() * UNITS).astype(np.int64)
    return found


def kept(row: np.ndarray, choice: Choice) -> np.ndarray:
    """Return the ids, int64 [n] ascending, that the filters keep of one row.

    Args:
        row: float32 or float64 [vocabulary] logits, adjusted, the largest of them finite.
        choice: how the row's token is chosen, with a temperature above 0.
    """
    vocabulary, peak = len(row), row.max()
    floor = floor_of(choice.min_p)
    ids = np.arange(vocabulary)
    if 0 < choice.top_k < vocabulary or choice.top_p < 1:
        ids = np.argsort(-row, kind="stable")[: choice.top_k or vocabulary]  # of ties, the lowest ids come first
    if choice.top_p < 1:
        share = shares(row[ids], peak, choice.temperature)
        limit = max(math.ceil(choice.top_p * float(share.sum())), 1)
        ids = ids[np.cumsum(share) - share < limit]
    return np.sort(ids[scaled(row[ids], peak, choice.temperature) >= floor])


def sample_plain(row: np.ndarray, choice: Choice) -> tuple[int, float]:
    """Return the entry with a row's best score, and its lead.

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
    """Return the place of each group's best score (the first of ties), and its lead over the others of the group.

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
    """Return the random words of a row's entries; see `words`."""
    return words(choice.seed, choice.sample, choice.position, ids)
