"""The best logits that masks allow, without the masks where a row's few largest logits tell.

Checking one token is a hundred times as fast as listing all that may come. A row's choice and lead are those of the
masked row: the token that must come, or the first two of the largest logits, in order, that may come; where these are
not among the few, the whole mask is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detgen.kernels import choosing
from detgen.kernels.penalties import Mask
from detgen.program.arrays import Array, array


class Allowed(NamedTuple):
    """The choices of some rows.

    Attributes:
        tokens: int64 [rows], the largest logits that may come, the first of ties.
        leads: float64 [rows], over the next one that may; inf if there is none.
        logprobs: float32 [rows], of all tokens' distribution.
    """

    tokens: np.ndarray
    leads: np.ndarray
    logprobs: np.ndarray


def best_allowed(logits: Array, rows: np.ndarray | None, masks: Sequence[Mask | None]) -> Allowed:
    """Choose the largest logits that may come.

    Args:
        logits: float32 [all rows, vocabulary] on the CPU; only read.
        rows: int64 [rows], the rows to choose for; None for all.
        masks: one for each of these; None where every token may come.
    """
    logits = array(logits)
    found = choosing.ranked(logits, rows)
    tokens, chosen, seconds = found.ids[:, 0].copy(), found.values[:, 0].copy(), found.values[:, 1].copy()
    finite = np.isfinite(found.logprobs[:, 0]) & np.isfinite(chosen)
    for i, (mask, ids, sound) in enumerate(zip(masks, found.ids.tolist(), finite.tolist(), strict=True)):
        if mask is None or not sound:
            continue
        row = logits[i if rows is None else rows[i]]
        if (forced := mask.forced) is None and len(places := _first_two(mask, ids)) == 2:
            tokens[i] = ids[places[0]]
            chosen[i], seconds[i] = found.values[i, places]
        elif forced is not None and forced < len(row):
            tokens[i], chosen[i], seconds[i] = forced, row[forced], -np.inf
        else:
            tokens[i], chosen[i], seconds[i] = _best_of(row, mask)
    # Of the row's largest, `x - x - rest`; so these are the bits of `x - largest - rest`.
    with np.errstate(invalid="ignore"):  # broken rows are chosen of below
        logprobs = chosen - found.values[:, 0] + found.logprobs[:, 0]
        leads = chosen.astype(np.float64) - seconds + 0.0
    if not finite.all():
        _broken(logits, rows, masks, Allowed(tokens, leads, logprobs), np.flatnonzero(~finite))
    return Allowed(tokens, leads, logprobs)


def _first_two(mask: Mask, ids: list[int]) -> list[int]:
    """Return the places of the first two tokens that may come, or of fewer if there are not two."""
    found: list[int] = []
    for place, token in enumerate(ids):
        if token >= 0 and mask.allows(token):
            found.append(place)
            if len(found) == 2:
                break
    return found


def _best_of(row: np.ndarray, mask: Mask) -> tuple[int, float, float]:
    """Return the best token that may come, its logit and the next best one; -inf where there is none."""
    ids = np.flatnonzero(mask.allowed(len(row)))
    if not len(ids):
        return 0, -np.inf, -np.inf
    values = row[ids]
    best = int(values.argmax())
    second = max(values[:best].max(initial=-np.inf), values[best + 1 :].max(initial=-np.inf))
    return int(ids[best]), values[best], second


def _broken(
    logits: np.ndarray, rows: np.ndarray | None, masks: Sequence[Mask | None], to: Allowed, left: np.ndarray
) -> None:
    """Choose for rows with entries that are not finite."""
    part = logits[left if rows is None else rows[left]]
    changed = choosing.masked(part, [None if (mask := masks[i]) is None else mask.bits for i in left.tolist()])
    best, to.leads[left] = choosing.best(changed)
    to.tokens[left], to.logprobs[left] = best, choosing.logprobs(part, best, None, full=False)[0]
