"""Choosing tokens by c/choosing.c and c/judging.c.

Promise: the tokens and leads are those of `sampling.scores`, bit for bit; log-probabilities are those of
docs/numerics.md. Logits are float32; tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from detgen.kernels.c.layout import CANDIDATES, RANKED, Best, Draws, Judged, Masked, Rows
from detgen.kernels.c.layout import Ranked as _Ranked
from detgen.kernels.c.library import best_build
from detgen.kernels.c.threads import threads
from detgen.program.arrays import Array, array
from detgen.program.operands import address

_FIELDS = frozenset(name for name, *_ in Draws._fields_)
KNOWN = _FIELDS | {"min_p"}  # whose logarithm is the floor
_LARGE = 1 << 20  # entries from which rows are divided among threads where each takes little


class Candidates(NamedTuple):
    """The entries of sampled rows that can have one of their row's two best scores.

    Attributes:
        found: int64 [rows], how many; 0 where a row's largest logit is not finite, -1 where they could not be told.
        ids: int64 [sum of those above 0], ascending in each row.
        words: uint64, random words of these entries.
        peaks: float32 [rows], the largest logits.
    """

    found: np.ndarray
    ids: np.ndarray
    words: np.ndarray
    peaks: np.ndarray


class Ranked(NamedTuple):
    """The largest entries of some rows, descending; ties in order of ids.

    Attributes:
        ids: int64 [rows, RANKED]; -1 where there are no more above -inf.
        values: float32 [rows, RANKED].
        logprobs: float32 [rows, RANKED]; NaN where any entry of the row is NaN.
    """

    ids: np.ndarray
    values: np.ndarray
    logprobs: np.ndarray


def ranked(logits: Array, rows: np.ndarray | None = None) -> Ranked:
    """Return the largest entries of rows.

    Args:
        logits: [all rows, vocabulary].
        rows: int64 [rows], the rows wanted; None for all.
    """
    logits = _by_rows(logits)
    count = len(logits) if rows is None else len(rows)
    made = Ranked(np.empty((count, RANKED), np.int64), *(np.empty((count, RANKED), np.float32) for _ in range(2)))
    of = _rows(logits, rows, count * logits.shape[1] > _LARGE // 4)
    best_build().ranked(_Ranked(of, *(values.ctypes.data for values in made)))
    return made


def best(logits: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest entry of each row (the first of ties), int64 [rows], and its lead, float64 [rows].

    Args:
        logits: [rows, vocabulary].
    """
    logits = _by_rows(logits)
    tokens, leads = np.empty(len(logits), np.int64), np.empty(len(logits))
    of = _rows(logits, None, logits.size > _LARGE)
    best_build().best(Best(of=of, tokens=address(tokens), leads=address(leads)))
    return tokens, leads


def masked(logits: Array, masks: Sequence[np.ndarray | None]) -> np.ndarray:
    """Copy rows with the entries that a mask bars set to -inf (NaN stays); float32 [rows, vocabulary].

    Args:
        logits: [rows, vocabulary].
        masks: of each row, uint8, a bit an entry, the lowest bit of a byte first, those behind its end not allowed;
            None where all are.
    """
    logits = _by_rows(logits)
    copies = np.empty(logits.shape, np.float32)
    kept = [None if mask is None else np.ascontiguousarray(mask) for mask in masks]
    places = np.array([0 if mask is None else mask.ctypes.data for mask in kept], np.uint64)
    sizes = np.array([0 if mask is None else len(mask) for mask in kept], np.int64)
    of = _rows(logits, None, logits.size > _LARGE // 4)
    best_build().mask(Masked(of, places.ctypes.data, sizes.ctypes.data, copies.ctypes.data))
    return copies


def logprobs(
    logits: Array, tokens: Array, rows: np.ndarray | None, *, full: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return log-probabilities of the rows' tokens, float32 [rows], and of all entries, float32 [rows, vocabulary].

    Args:
        logits: [all rows, vocabulary].
        tokens: int64 [all rows].
        rows: int64 [rows], which are wanted; None for all.
        full: whether log-probabilities of all entries are wanted.
    """
    logits = _by_rows(logits)
    count = len(logits) if rows is None else len(rows)
    chosen = np.empty(count, np.float32)
    every = np.empty((count, logits.shape[1]), np.float32) if full else None
    tokens = array(tokens)
    judged = Judged(_rows(logits, rows, count * logits.shape[1] > _LARGE // 4), address(tokens), address(chosen))
    if every is not None:
        judged.every = every.ctypes.data
    best_build().judge(judged)
    return chosen, every


def draws(vocabulary: int, how: Mapping[str, np.ndarray]) -> Draws:
    """Return how the tokens of sequences are sampled, for passes that go on with the likely choices.

    Args:
        vocabulary: number of logits in a row.
        how: the arguments of `draw`.
    """
    made = Draws(of=Rows(stride=vocabulary, vocabulary=vocabulary, count=len(how["temperature"]), threads=1))
    return _told(made, how)


def draw(
    logits: Array,
    rows: np.ndarray,
    how: Mapping[str, np.ndarray],
) -> Candidates:
    """Return the candidates of sampled rows.

    Args:
        logits: [all rows, vocabulary].
        rows: int64 [rows], the sampled rows.
        how: an array [rows] for each of the parameters that `Draws` has, by its name; temperatures above 0, and the
            floor, the logarithm of min_p, -inf for none.
    """
    logits, count = _by_rows(logits), len(rows)
    ids, words = np.empty((count, CANDIDATES), np.int64), np.empty((count, CANDIDATES), np.uint64)
    found, peaks = np.empty(count, np.int64), np.empty(count, np.float32)
    of = _rows(logits, rows, count > 1 and count * logits.shape[1] > _LARGE // 4)
    best_build().draws(_told(Draws(of=of), {**how, "ids": ids, "words": words, "found": found, "peaks": peaks}))
    kept = np.arange(CANDIDATES) < found[:, None]
    return Candidates(found, ids[kept], words[kept], peaks)


def _told(made: Draws, arrays: Mapping[str, np.ndarray]) -> Draws:
    """The same with arrays, by the names of its fields; it keeps them."""
    made.kept = {name: found for name, found in arrays.items() if name in _FIELDS}
    for name, found in made.kept.items():
        setattr(made, name, address(found))
    return made


def _by_rows(logits: Array) -> np.ndarray:
    """The same as an array, the entries of a row side by side."""
    found = array(logits)
    return found if found.strides[1] == found.itemsize else np.ascontiguousarray(found)


def _rows(logits: np.ndarray, rows: np.ndarray | None, several: bool) -> Rows:
    """Those that are meant; `several`: whether threads share the work."""
    assert logits.dtype == np.float32
    place, count = (0, len(logits)) if rows is None else (address(rows), len(rows))
    stride = logits.strides[0] // logits.itemsize
    return Rows(address(logits), place, stride, count, logits.shape[1], threads() if several else 1)
