"""Sampling in plain numpy: the way without a compiler, and where rounding decides what a filter keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from detgen.kernels.filters import kept_rows, scaled
from detgen.kernels.noise import gumbel, most_gumbel, words

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choice

_LEAST = 1e-3  # least temperature at which rows are sifted: logits divided by smaller ones overflow float32
_BLOCK = 1 << 16  # entries of rows processed together
_LARGE = 1 << 19  # entries from which the rows are divided among threads


def sample_plain(rows: np.ndarray, choices: list[Choice]) -> tuple[np.ndarray, np.ndarray]:
    """The best entry of each row's scores, int64 [rows], and its lead; computes the scores of few entries only.

    Args:
        rows: float32 [rows, vocabulary], contiguous.
        choices: one per row, with temperatures above 0.
    """
    peaks = rows.max(1)
    sound = np.isfinite(peaks)
    if not sound.all():
        tokens, ahead = rows.argmax(1), np.full(len(rows), np.inf)
        if sound.any():
            some = [c for c, one in zip(choices, sound.tolist(), strict=True) if one]
            tokens[sound], ahead[sound] = sample_plain(rows[sound], some)
        return tokens, ahead
    parts = []
    first = 0
    size = max(_BLOCK // rows.shape[1], 1)
    for _, alike in itertools.groupby(choices, lambda c: (c.temperature, c.top_k, c.top_p, c.min_p)):
        last = first + len(list(alike))
        parts += [slice(start, min(start + size, last)) for start in range(first, last, size)]
        first = last

    def best(part: slice) -> tuple[np.ndarray, np.ndarray]:
        return _best(rows[part], peaks[part, None], choices[part])

    threads = min(torch.get_num_threads(), len(parts))
    if threads > 1 and rows.size > _LARGE:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(best, parts))
    else:
        found = [best(part) for part in parts]
    return np.concatenate([tokens for tokens, _ in found]), np.concatenate([ahead for _, ahead in found])


def _best(rows: np.ndarray, peaks: np.ndarray, choices: Sequence[Choice]) -> tuple[np.ndarray, np.ndarray]:
    """Like `sample_plain`, for rows with equal parameters; peaks are float32 [rows, 1]."""
    one = choices[0]
    # Row, id and word of each candidate for the best two, ordered by row.
    if one.filtered or one.temperature < _LEAST:
        at, ids = kept_rows(rows, peaks, one)
        each = np.split(ids, np.searchsorted(at, np.arange(1, len(rows))))
        drawn = np.concatenate([words_of(c, own) for c, own in zip(choices, each, strict=True)])
    else:
        every = np.stack([words_of(c, rows.shape[1]) for c in choices])
        at, ids = _sift(rows, every, peaks, one.temperature)
        drawn = every[at, ids]
    score = scaled(rows[at, ids], peaks[at, 0], one.temperature) + gumbel(drawn)
    first, ahead = leading(score, np.searchsorted(at, np.arange(len(rows))), np.bincount(at))
    return ids[first], ahead


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


def words_of(choice: Choice, ids: np.ndarray | int) -> np.ndarray:
    """The random words of a row's entries; see `words`."""
    return words(choice.seed, choice.sample, choice.position, ids)


def _sift(rows: np.ndarray, drawn: np.ndarray, peaks: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The entries that may have a row's two best scores: those whose bound is above the worse of two good scores.

    Args:
        rows: float32 [rows, vocabulary] logits.
        drawn: uint64 [rows, vocabulary], their random words.
        peaks: float32 [rows, 1].
        temperature: the rows' temperature.

    Returns:
        Rows and columns, int64 [n] each, ascending.
    """
    row = np.arange(len(rows))[:, None]
    with np.errstate(over="ignore"):  # masked logits can be as low as float32 goes
        bound = rows - peaks
        bound /= np.float32(temperature)
        bound += most_gumbel(drawn)
        first = bound.argmax(1, keepdims=True)
        top = bound[row, first]
        bound[row, first] = -np.inf
        second = bound.argmax(1, keepdims=True)
        two = np.concatenate([first, second], 1)
        least = (scaled(rows[row, two], peaks, temperature) + gumbel(drawn[row, two])).min(1, keepdims=True)
        least[bound[row, second] == -np.inf] = -np.inf  # all others are too low for float32 to distinguish
        bound[row, first] = top
        at, ids = np.nonzero(bound >= (least - 1e-4 - 1e-6 * abs(least)).astype(np.float32))
    return at, ids
