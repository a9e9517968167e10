"""Whether rounding explains a token: whether logits that are off by no more than so much could have given it.

Filters are asked about the worst and the best that an error can do to a token. What helps one token most against all
filters at once is to raise it and all that stands below it; what harms it most is to raise all that is above it or can
come there.
"""

from __future__ import annotations

import numpy as np

from detgen.kernels.filters import kept
from detgen.kernels.noise import gumbel, words
from detgen.kernels.penalties import adjusted_row
from detgen.kernels.sampling import Choice
from detgen.program.arrays import Array, array


def largest(logits: Array) -> np.ndarray:
    """The largest finite magnitude of each row, float32 [rows]."""
    numbers = array(logits)
    found: np.ndarray = np.abs(np.where(np.isfinite(numbers), numbers, np.float32(0))).max(-1)
    return found


def rounding_explains(logits: Array, choice: Choice, token: int, error: float) -> bool:
    """Whether a token could be the choice where differences of logits are off by `error` at most.

    It is not if the filters drop it in the best case, or if a competitor that they keep even in its worst case has a
    score that is too far ahead.

    Args:
        logits: float32 [vocabulary], not yet adjusted.
        choice: how the token was chosen.
        token: its id.
        error: not negative.
    """
    row = adjusted_row(array(logits), choice.adjustment).astype(np.float64)
    if choice.adjustment is not None:
        error *= choice.adjustment.stretch
    if not np.isfinite([row[token], row.max()]).all():
        return False  # a token that the model rules out, or a broken model
    if choice.temperature == 0:
        return bool(row[token] >= row.max() - error)
    if token not in kept(_at_best(row, token, error), choice):
        return False
    score = row / choice.temperature + gumbel(words(choice.seed, choice.sample, choice.position, len(row)))
    ahead = np.flatnonzero(score > score[token] + error / choice.temperature)
    if not len(ahead):
        return True
    rival = int(ahead[row[ahead].argmax()])  # if filters can drop this one, they can drop those with lower logits, too
    return rival not in kept(_at_worst(row, rival, error), choice)


def _at_best(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Logits within the error that keep a token if any do: nothing passes it, and what it is behind weighs least."""
    top = row[token] + error
    found = np.where(row > row[token], np.maximum(row, top), row + error)
    found[token] = np.nextafter(top, np.inf)  # ahead of its equals
    return found


def _at_worst(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Logits within the error that drop a token if any do: whatever can pass it does, and weighs most."""
    found = np.where(row + error >= row[token], np.nextafter(row + error, np.inf), row)
    found[token] = row[token]
    return found
