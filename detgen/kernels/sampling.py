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

from detgen.kernels import choosing
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


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How to choose the tokens of many rows: what `Choice` has, as arrays with an entry a row.

    Attributes:
        temperature: float64, like top_p and min_p.
        top_p: see `Choice`.
        top_k: int64.
        min_p: see `Choice`.
        seed: uint64, like sample and position.
        sample: see `Choice`.
        position: see `Choice`.
        adjustments: None if there is none in any row.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    adjustments: Sequence[Adjustment | None] | None = None

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Choices:
        """The same as single choices."""
        adjustments = [c.adjustment for c in choices]
        arrays: dict[str, Any] = {
            name: np.array([getattr(c, name) for c in choices], dtype) for name, dtype in _ARRAYS.items()
        }
        return cls(**arrays, adjustments=adjustments if any(a is not None for a in adjustments) else None)

    def __len__(self) -> int:
        return len(self.temperature)

    def __getitem__(self, row: int) -> Choice:
        adjustment = self.adjustments[row] if self.adjustments is not None else None
        return Choice(**{name: getattr(self, name)[row].item() for name in _ARRAYS}, adjustment=adjustment)

    def take(self, rows: np.ndarray) -> Choices:
        """Those of some rows, int64 [n], without adjustments."""
        return Choices(*(getattr(self, name)[rows] for name in _ARRAYS))


_ARRAYS: dict[str, type[np.generic]] = {
    "temperature": np.float64,
    "top_p": np.float64,
    "top_k": np.int64,
    "min_p": np.float64,
    "seed": np.uint64,
    "sample": np.uint64,
    "position": np.uint64,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens of some rows.

    Attributes:
        tokens: int64 [rows], on the logits' device.
        leads: float64 [rows], each token's lead over the runner-up, in perturbed log-probability or in (adjusted)
            logits; inf if there is none. NaN where it is not known yet, as it may be of rows that are neither sampled
            nor adjusted, and where logits are not finite.
    """

    tokens: torch.Tensor
    leads: np.ndarray


def choose(logits: torch.Tensor, choices: Sequence[Choice] | Choices | None) -> Chosen:
    """The best entry of each row's `scores`; ties go to the lowest id.

    Args:
        logits: float32 [rows, vocabulary], adjusted in the meantime where choices say so.
        choices: one per row; None if all rows take the best logit.
    """
    if choices is None:
        return _greedy(logits)
    if not isinstance(choices, Choices):
        choices = Choices.of(choices)
    if choices.adjustments is None:
        return _choose(logits, choices)
    with adjusted(logits, choices.adjustments):
        return _choose(logits, choices)


def _choose(logits: torch.Tensor, choices: Choices) -> Chosen:
    """The same of logits that are adjusted already."""
    sampled = np.flatnonzero(choices.temperature > 0)
    if len(sampled) == len(choices):
        tokens, ahead = _sample(logits, sampled, choices)
        return Chosen(torch.from_numpy(tokens).to(logits.device), ahead)
    picked = _greedy(logits)
    unknown = np.isnan(picked.leads)
    if choices.adjustments is not None and unknown.any():
        rows = [i for i, a in enumerate(choices.adjustments) if a is not None and unknown[i]]
        picked.leads[rows] = leads(logits[rows], picked.tokens[rows]).cpu().numpy()
    if len(sampled):
        tokens, picked.leads[sampled] = _sample(logits, sampled, choices.take(sampled))
        picked.tokens[torch.from_numpy(sampled).to(logits.device)] = torch.from_numpy(tokens).to(logits.device)
    return picked


def _greedy(logits: torch.Tensor) -> Chosen:
    """The best logits; their leads only where these cost nothing."""
    found = choosing.best(logits)
    return Chosen(*found) if found is not None else Chosen(argmax(logits), np.full(len(logits), np.nan))


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
    return top - logits.scatter_(-1, best, -torch.inf).amax(-1).double() + 0.0  # of zeros with two signs, none is less


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


def _sample(logits: torch.Tensor, sampled: np.ndarray, choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """The best entry of the scores of sampled rows, int64 [n], and its lead; computes the scores of few entries only.

    Args:
        logits: float32 [rows, vocabulary].
        sampled: int64 [n], which rows are sampled.
        choices: one per sampled row, with temperatures above 0.
    """
    if logits.device.type != "cpu" or logits.stride(1) != 1:
        logits = logits[torch.from_numpy(sampled).to(logits.device)].cpu().contiguous()
        sampled = np.arange(len(sampled))
    rows = logits.numpy()
    floors = np.full(len(sampled), -np.inf)
    for i in np.flatnonzero(choices.min_p).tolist():
        floors[i] = math.log(choices.min_p[i])
    drawn = choosing.draw(
        logits,
        sampled,
        temperature=choices.temperature,
        top_p=choices.top_p,
        floor=floors,
        top_k=choices.top_k,
        seed=choices.seed,
        sample=choices.sample,
        position=choices.position,
    )
    if drawn is None:
        return _sample_plain(np.ascontiguousarray(rows[sampled]), [choices[i] for i in range(len(sampled))])
    told = drawn.found > 0
    some, counts = np.flatnonzero(told), drawn.found[told]
    tokens, ahead = np.empty(len(sampled), np.int64), np.empty(len(sampled))
    if len(some):
        at = np.repeat(some, counts)
        score = _scaled(rows[sampled[at], drawn.ids], drawn.peaks[at], choices.temperature[at]) + gumbel(drawn.words)
        best, ahead[some] = _leading(score, np.cumsum(counts) - counts, counts)
        tokens[some] = drawn.ids[best]
    if len(some) < len(sampled):
        others = np.flatnonzero(~told)
        plain = [choices[i] for i in others.tolist()]
        tokens[others], ahead[others] = _sample_plain(np.ascontiguousarray(rows[sampled[others]]), plain)
    return tokens, ahead


def _leading(score: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _sample_plain(rows: np.ndarray, choices: list[Choice]) -> tuple[np.ndarray, np.ndarray]:
    """Like `_sample`, without a compiler.

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
            tokens[sound], ahead[sound] = _sample_plain(rows[sound], some)
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
    """Like `_sample_plain`, for rows with equal parameters; peaks are float32 [rows, 1]."""
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
    first, ahead = _leading(score, np.searchsorted(at, np.arange(len(rows))), np.bincount(at))
    return ids[first], ahead


def _words(choice: Choice, ids: np.ndarray | int) -> np.ndarray:
    return words(choice.seed, choice.sample, choice.position, ids)


def _scaled(logits: np.ndarray, peaks: np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
    """(Logits - peak) / temperature, float64."""
    scaled: np.ndarray = (logits.astype(np.float64) - peaks) / np.maximum(temperature, 1e-200)  # nothing overflows
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
