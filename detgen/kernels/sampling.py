"""Choosing tokens: argmax of the logits, or of perturbed log-probabilities.

Promise: the token chosen for a row is a function of the row's logits, its parameters, its seed, its sample, its
position and the tokens before it (`penalties`).

Adding Gumbel noise to the logits and taking the argmax samples from their softmax (Maddison et al., "A* sampling",
2014, section 2); the noise is counter-based (`noise`), and a drafter that uses the same noise agrees with the target as
often as the two distributions allow (arXiv 2408.07978).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from detgen.kernels.noise import gumbel, most_gumbel, words
from detgen.kernels.penalties import Adjustment, adjusted, adjusted_row

_LEAST = 1e-3  # least temperature at which rows are sifted: logits divided by smaller ones overflow float32
_BLOCK = 1 << 16  # entries of rows processed together
_LARGE = 1 << 19  # entries from which the rows are divided among threads
_FIRST = 1024  # entries of a row that are sorted for top_p; all, if these have less of the probability


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose one row's token; the fields mean the same as those of `SamplingParams`.

    The adjustment is what the parameters that depend on the tokens before the row make of its logits, before all else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    position: int = 0
    adjustment: Adjustment | None = field(default=None, compare=False)

    @classmethod
    def of(cls, params: Any, sample: int) -> Choice:
        """The choice of a sample's first token, from `SamplingParams`."""
        return cls(**{name: getattr(params, name) for name in _OF_REQUEST}, sample=sample)

    @property
    def filtered(self) -> bool:
        """Whether a filter may drop tokens."""
        return bool(self.top_k or self.min_p) or self.top_p < 1


_OF_REQUEST = tuple(f.name for f in fields(Choice) if f.name not in ("sample", "position", "adjustment"))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens of some rows.

    Attributes:
        tokens: int64 [rows], on the logits' device.
        leads: by row that is sampled or adjusted: its token's lead over the runner-up, in perturbed log-probability or
            in adjusted logits; inf if there is none.
    """

    tokens: torch.Tensor
    leads: dict[int, float]


def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> Chosen:
    """The best entry of each row's `scores`; ties go to the lowest id.

    Args:
        logits: float32 [rows, vocabulary], adjusted in the meantime where choices say so.
        choices: one per row.
    """
    with adjusted(logits, [c.adjustment for c in choices]):
        return _choose(logits, choices)


def _choose(logits: torch.Tensor, choices: Sequence[Choice]) -> Chosen:
    """The same of logits that are adjusted already."""
    sampled = [i for i, c in enumerate(choices) if c.temperature > 0]
    picked = argmax(logits) if len(sampled) < len(logits) else torch.empty_like(logits[:, 0], dtype=torch.int64)
    found: dict[int, float] = {}
    if sampled:
        rows = (logits if len(sampled) == len(logits) else logits[sampled]).cpu().numpy()
        tokens, ahead = _sample(rows, [choices[i] for i in sampled])
        picked[sampled] = torch.from_numpy(tokens).to(picked.device)
        found.update(zip(sampled, ahead.tolist(), strict=True))
    if greedy := [i for i, c in enumerate(choices) if c.temperature == 0 and c.adjustment is not None]:
        found.update(zip(greedy, leads(logits[greedy], picked[greedy]).tolist(), strict=True))
    return Chosen(picked, found)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The largest entry of each row, the first one of ties, int64 [rows]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))  # 6 times as fast as torch's, with the same ties
    return torch.argmax(logits, dim=-1)


def leads(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """The lead of each row's best entry over the runner-up.

    Args:
        logits: [rows, vocabulary], overwritten.
        best: int64 [rows], from `argmax`.

    Returns:
        float64 [rows]; inf if there is no other candidate.
    """
    best = best[:, None]
    top = logits.gather(-1, best)[:, 0].double()
    return top - logits.scatter_(-1, best, -torch.inf).amax(-1).double()


def scores(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """The scores whose argmax is chosen: the logits at temperature 0, else filtered logits / temperature plus noise.

    The logits are adjusted first. Filters apply in the order temperature, top_k, top_p, min_p; ties in top_k and top_p
    go to the lower token id. A broken model's row, whose largest logit is not finite, stays as it is.

    Args:
        logits: float32 [vocabulary].
        choice: how the row's token is chosen.

    Returns:
        float64 [vocabulary] on the CPU.
    """
    row = adjusted_row(logits, choice.adjustment).cpu().numpy()
    peaks = row.max()[None, None]
    if not choice.temperature or not np.isfinite(peaks):
        return torch.from_numpy(row.astype(np.float64))
    _, ids = _kept(row[None], peaks, choice)
    found = np.full(len(row), -np.inf)
    found[ids] = _scaled(row[ids], peaks[0], choice.temperature) + gumbel(_words(choice, ids))
    return torch.from_numpy(found)


def _sample(rows: np.ndarray, choices: list[Choice]) -> tuple[np.ndarray, np.ndarray]:
    """The best entry of each row's scores, int64 [rows], and its lead; computes the scores of few entries only.

    Args:
        rows: float32 [rows, vocabulary].
        choices: one per row, with temperatures above 0.
    """
    rows = np.ascontiguousarray(rows)  # another memory order would change the order of summation
    peaks = rows.max(1)
    sound = np.isfinite(peaks)
    if not sound.all():
        tokens, ahead = rows.argmax(1), np.full(len(rows), np.inf)
        if sound.any():
            some = [c for c, one in zip(choices, sound.tolist(), strict=True) if one]
            tokens[sound], ahead[sound] = _sample(rows[sound], some)
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
    """Like `_sample`, for rows with equal parameters; peaks are float32 [rows, 1]."""
    one = choices[0]
    # Row, id and word of each candidate for the best two, ordered by row.
    if one.filtered or one.temperature < _LEAST:
        at, ids = _kept(rows, peaks, one)
        each = np.split(ids, np.searchsorted(at, np.arange(1, len(rows))))
        drawn = np.concatenate([_words(c, own) for c, own in zip(choices, each, strict=True)])
    else:
        every = np.stack([_words(c, rows.shape[1]) for c in choices])
        at, ids = _sift(rows, every, peaks, one.temperature)
        drawn = every[at, ids]
    score = _scaled(rows[at, ids], peaks[at, 0], one.temperature) + gumbel(drawn)
    row = np.arange(len(rows))
    starts = np.searchsorted(at, row)
    top = np.maximum.reduceat(score, starts)
    first = np.flatnonzero(score == top[at])
    first = first[np.searchsorted(at[first], row)]
    score[first] = -np.inf
    return ids[first], top - np.maximum.reduceat(score, starts)


def _words(choice: Choice, ids: np.ndarray | int) -> np.ndarray:
    return words(choice.seed, choice.sample, choice.position, ids)


def _scaled(logits: np.ndarray, peaks: np.ndarray, temperature: float) -> np.ndarray:
    """(Logits - peak) / temperature, float64."""
    scaled: np.ndarray = (logits.astype(np.float64) - peaks) / max(temperature, 1e-200)  # nothing overflows
    return scaled


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
        least = (_scaled(rows[row, two], peaks, temperature) + gumbel(drawn[row, two])).min(1, keepdims=True)
        least[bound[row, second] == -np.inf] = -np.inf  # all others are too low for float32 to distinguish
        bound[row, first] = top
        at, ids = np.nonzero(bound >= (least - 1e-4 - 1e-6 * abs(least)).astype(np.float32))
    return at, ids


def kept(row: np.ndarray, choice: Choice) -> np.ndarray:
    """Ids, int64 [n] ascending, of what the filters keep of one row.

    Args:
        row: float32 or float64 [vocabulary] logits, adjusted, the largest of them finite.
        choice: the row's, with a temperature above 0.
    """
    return _kept(row[None], row.max()[None, None], choice)[1]


def _kept(rows: np.ndarray, peaks: np.ndarray, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Rows and ids of the entries that the filters keep, int64 [n] each, ascending."""
    vocabulary = rows.shape[1]
    width = min(choice.top_k or vocabulary, vocabulary)
    floor = math.log(choice.min_p) if choice.min_p else -math.inf
    if width == vocabulary and choice.top_p == 1:
        at, ids = np.nonzero(_scaled(rows, peaks, choice.temperature) >= floor)
        return at, ids
    counts, last = _boundaries(rows, peaks, width, choice)
    at, ids = np.nonzero(rows >= last)
    logits = rows[at, ids]
    kept = _scaled(logits, peaks[at, 0], choice.temperature) >= floor
    held = np.bincount(at, minlength=len(rows))
    for row in np.flatnonzero(held > counts).tolist():
        own = slice(*np.searchsorted(at, [row, row + 1]).tolist())
        tied = np.flatnonzero(logits[own] == last[row]) + own.start
        kept[tied[counts[row] - held[row] :]] = False
    return at[kept], ids[kept]


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
    share = np.exp(_scaled(top, peaks, choice.temperature))
    total = (share if width < vocabulary else np.exp(_scaled(rows, peaks, choice.temperature))).sum(1, keepdims=True)
    kept = 1 + (np.cumsum(share[:, :-1], axis=1) < choice.top_p * total).sum(1)
    last = top[np.arange(len(rows)), kept - 1, None]
    short = kept == count
    if count < width and short.any():
        kept[short], last[short] = _boundaries(rows[short], peaks[short], width, choice, vocabulary)
    return kept, last
