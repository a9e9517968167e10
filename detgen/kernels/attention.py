"""Traits of attention over packed rows, and how its work is cut up.

Promise: the result of a query row depends on its query, on the keys and values at the positions it may see, and on
nothing else. Keys are read from position 0 in whole blocks of BLOCK, which are added one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detgen.program.operands import PAGE

BLOCK = PAGE  # keys per block, at absolute positions 0, BLOCK, 2 * BLOCK, ...
SHARING = 64  # query rows per KV head that share what is read of keys and values


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """A layer's attention, apart from queries, keys and values.

    Attributes:
        scale: factor of the scores.
        window: number of positions that a row sees, its own included; None for all.
        softcap: scores become softcap * tanh(score / softcap) before the mask; None for none.
        chunk: positions of a chunk, counted from position 0; a row sees none before its own. None for no chunks.
        sinks: a score of each head that takes its share of the softmax and has no value; None for none, or where they
            are not known yet.
        slopes: for each head, subtracted from a score for each position between key and row; None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: tuple[float, ...] | None = None
    slopes: tuple[float, ...] | None = None


def cut_pieces(slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, most: int) -> np.ndarray:
    """Cut windows into pieces of at most `most` tokens.

    Args:
        slots: int64 [windows].
        starts: int64 [windows], position of the first token.
        lengths: int64 [windows], number of tokens; the rows of the pass are those of the windows in order.
        most: most tokens of a piece.

    Returns:
        int64 [pieces, 4]: slot, position of the first token, number of tokens, row of the first token.
    """
    rows = np.cumsum(lengths) - lengths
    if lengths.max() > most:
        counts = -(-lengths // most)
        of = np.repeat(np.arange(len(counts)), counts)
        at = most * (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts))
        slots, starts, rows, lengths = slots[of], starts[of] + at, rows[of] + at, np.minimum(lengths[of] - at, most)
    return np.stack((slots, starts, lengths, rows), axis=1)


def lay_out(slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, group: int) -> np.ndarray:
    """Lay windows out for native attention: cut into pieces, which threads take one by one.

    Args:
        slots: int64 [windows].
        starts: int64 [windows], position of the first token.
        lengths: int64 [windows], number of tokens; the rows of the pass are those of the windows in order.
        group: query heads per KV head.

    Returns:
        int64 [pieces, 4]; see `cut_pieces`. The longest come first, so that no thread is left with one at the end.
    """
    pieces = cut_pieces(slots, starts, lengths, max(SHARING // group, 1))
    work = (pieces[:, 1] + pieces[:, 2]) * (pieces[:, 2] + 1)
    found: np.ndarray = pieces[np.argsort(-work, kind="stable")]
    return found
