"""Adjusting logits before a token is chosen: biases, penalties for tokens that occurred, tokens that may not come.

Promise: what becomes of an entry is a function of its own logit, of the parameters and of the tokens before the row.
Each is computed by itself, in float32, by the steps of `reference`, so nothing else in the pass matters, and a CPU and
a GPU give the same bits. Entries that nothing applies to are untouched, and so are rows without parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from detgen.kernels import choosing

_NO_IDS, _NO_TERMS = np.zeros(0, np.int64), np.zeros((5, 0), np.float32)
_ROOM = 64  # entries for which an adjuster has room at first, beside those that it knows


@dataclass(frozen=True, slots=True)
class Penalties:
    """The parameters of a request that adjust logits; the fields mean the same as those of `SamplingParams`.

    Attributes:
        repetition: for tokens of prompt and completion: divides positive logits, multiplies negative ones.
        frequency: subtracted for each occurrence of a token in the completion.
        presence: subtracted once for each token that occurs in the completion.
        bias: added to logits, by token id.
        banned: token ids that may not come among the first `min_tokens` tokens.
        min_tokens: the number of these first tokens.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: frozenset[int] = frozenset()
    min_tokens: int = 0

    @classmethod
    def of(cls, params: Any, banned: frozenset[int]) -> Penalties:
        """Return the penalties of a request, given its `SamplingParams`."""
        return cls(
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            bias=params.logit_bias,
            banned=banned if params.min_tokens else frozenset(),
            min_tokens=params.min_tokens if banned else 0,
        )

    @property
    def counted(self) -> bool:
        """Whether it matters which tokens the completion has."""
        return self.repetition != 1 or bool(self.frequency or self.presence)


class Mask:
    """Which tokens may come next, where a request prescribes the form of its text.

    Attributes:
        bits: uint8 [at least vocabulary / 8], one bit per token, the lowest bit of a byte first.
        error: why the mask cannot be computed; "" if it can, as far as was asked.
    """

    def __init__(self, bits: np.ndarray, error: str = "") -> None:
        self._bits, self.error = bits, error

    @property
    def bits(self) -> np.ndarray:
        """The bits of all tokens."""
        return self._bits

    def allows(self, token: int) -> bool:
        """Return whether a token may come."""
        return token >> 3 < len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)

    def allowed(self, count: int) -> np.ndarray:
        """Return which of the first `count` tokens may come, bool [count]; tokens beyond the mask may not."""
        found = np.unpackbits(self.bits[: (count + 7) // 8], count=count, bitorder="little")
        return found.view(np.bool_)

    @property
    def forced(self) -> int | None:
        """The only token that may come; None if there are several or none, or if it is not known."""
        some = np.flatnonzero(self.bits)
        if len(some) != 1 or (byte := int(self.bits[some[0]])) & (byte - 1):
            return None
        return 8 * int(some[0]) + byte.bit_length() - 1


class Masks(Protocol):
    """Gives the masks of one sample's rows."""

    def after(self, completion: list[int]) -> Mask | None:
        """Return the mask after a completion; None where any token may come."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """How one row is adjusted.

    Attributes:
        ids: int64 [n], the entries that change, each once.
        terms: float32 [5, n]: an addend; the divisor of a positive sum, or factor of a negative one; what is subtracted
            for the count and then for the presence; and the upper bound of the result, inf or -inf.
        mask: afterwards, entries that it does not allow become -inf, except NaN; None if all stay.
    """

    ids: np.ndarray
    terms: np.ndarray
    mask: Mask | None = None

    def listed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and terms that have the same effect without the mask: they include the entries that it bars."""
        if self.mask is None:
            return self.ids, self.terms
        barred = ~self.mask.allowed(8 * len(self.mask.bits))
        terms = self.terms.copy()
        terms[4, barred[self.ids]] = -np.inf
        barred[self.ids] = False
        more = np.flatnonzero(barred)
        added = np.zeros((5, len(more)), np.float32)
        added[1], added[4] = 1, -np.inf
        return np.concatenate([self.ids, more]), np.concatenate([terms, added], 1)

    @property
    def only_mask(self) -> bool:
        """Whether the row has a mask and no other adjustment."""
        return self.mask is not None and not len(self.ids)

    @property
    def stretch(self) -> float:
        """By what factor the distance of two logits can grow, apart from what is added and subtracted."""
        factors = self.terms[1]
        if not len(factors):
            return 1.0
        return float(max(factors.max(), 1 / factors.min(), 1.0))


def reference(
    logits: np.ndarray, penalties: Penalties, prompt: list[int], completion: list[int], mask: Mask | None = None
) -> np.ndarray:
    """Return the logits from which the token after `completion` is chosen.

    The order is vLLM's, which bans tokens first, with the same result; transformers agrees where it has the parameter.

    Args:
        logits: float32 [vocabulary].
        penalties: penalties of the request.
        prompt: tokens of the prompt.
        completion: tokens generated so far.
        mask: which tokens may come next; None for any.
    """
    allowed = np.ones(len(logits), bool) if mask is None else mask.allowed(len(logits))
    row = logits.copy()
    for token, bias in penalties.bias:
        row[token] += np.float32(bias)
    seen = np.zeros(len(row), bool)
    seen[[*prompt, *completion]] = True
    factor = np.where(seen, np.float32(penalties.repetition), np.float32(1))
    row = np.where(row < 0, row * factor, row / factor)
    counts = np.bincount(np.array(completion, np.int64), minlength=len(row)).astype(np.float32)
    row = row - counts * np.float32(penalties.frequency)
    row = row - (counts > 0).astype(np.float32) * np.float32(penalties.presence)
    if len(completion) < penalties.min_tokens:
        early = allowed.copy()
        early[list(penalties.banned)] = False
        allowed = early if early.any() else allowed  # a text that is complete ends
    found: np.ndarray = np.where(allowed | np.isnan(row), row, np.float32(-np.inf))
    return found


class Growing(NamedTuple):
    """How consecutive rows of one sample are adjusted, as its completion grows by the chosen tokens.

    Attributes:
        ids: see `Adjustment`, as of the first row.
        terms: likewise.
        counts: float32 [n], how often the completion contains each id.
        penalties: penalties of the request.
        left: number of rows for which the completion is shorter than `min_tokens`.
    """

    ids: np.ndarray
    terms: np.ndarray
    counts: np.ndarray
    penalties: Penalties
    left: int


class Adjuster:
    """Makes the adjustments of one sample's rows.

    The result is a function of the given tokens alone. The counts of the tokens last asked about are kept and updated
    from there, so that a row costs as much as the number of its different tokens, not the whole text.

    Args:
        penalties: of the request.
        prompt: its tokens.
        masks: masks of the form of its text; None for any text.
    """

    def __init__(self, penalties: Penalties, prompt: list[int], masks: Masks | None = None) -> None:
        self._penalties, self._masks = penalties, masks
        repeated: Iterable[int] = dict.fromkeys(prompt) if penalties.repetition != 1 else ()
        biased = [token for token, _ in penalties.bias]
        ids = list(dict.fromkeys([*repeated, *biased, *sorted(penalties.banned)]))
        self._place = {token: i for i, token in enumerate(ids)}
        self._known = len(ids)
        size = len(ids) + _ROOM
        self._ids = np.zeros(size, np.int64)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(size, np.float32)
        self._added = np.zeros(size, np.float32)
        self._added[self._places(biased)] = [bias for _, bias in penalties.bias]
        self._repeated = np.zeros(size, bool)
        self._repeated[self._places(repeated)] = True
        self._most = np.full(size, np.inf, np.float32)
        self._most[self._places(penalties.banned)] = -np.inf
        self._counted: list[int] = []

    def after(self, completion: list[int]) -> Adjustment | None:
        """Return how the logits of the token after `completion` are adjusted; None if they are not.

        Args:
            completion: committed and drafted tokens.
        """
        penalties, early = self._penalties, len(completion) < self._penalties.min_tokens
        mask = None if self._masks is None else self._masks.after(completion)
        if early and mask is not None:
            allowed = mask.allowed(8 * len(mask.bits))
            allowed[list(penalties.banned)] = False
            early = bool(allowed.any())  # a text that is complete ends
        if penalties.counted:
            self._count(completion)
        n = len(self._place)
        if not n or not (penalties.counted or penalties.bias or early):
            return None if mask is None else Adjustment(_NO_IDS, _NO_TERMS, mask)
        counts = self._counts[:n]
        present = counts > 0
        terms = np.empty((5, n), np.float32)
        terms[0] = self._added[:n]
        terms[1] = np.where(self._repeated[:n] | present, np.float32(penalties.repetition), np.float32(1))
        terms[2] = counts * np.float32(penalties.frequency)
        terms[3] = present * np.float32(penalties.presence)
        terms[4] = self._most[:n] if early else np.inf
        return Adjustment(self._ids[:n].copy(), terms, mask)

    def growing(self, completion: list[int]) -> Growing:
        """Return how the logits of the tokens after `completion` are adjusted, where its text may be any."""
        made = self.after(completion)
        ids, terms = (_NO_IDS, _NO_TERMS) if made is None else (made.ids, made.terms)
        left = self._penalties.min_tokens - len(completion)
        return Growing(ids, terms, self._counts[: len(ids)].copy(), self._penalties, left)

    def _places(self, tokens: Iterable[int]) -> list[int]:
        return [self._place[token] for token in tokens]

    def _count(self, completion: list[int]) -> None:
        """Set the counts to those of `completion`."""
        while self._counted != completion[: len(self._counted)]:
            self._forget()
        for token in completion[len(self._counted) :]:
            self._learn(token)

    def _learn(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._grow()
        self._ids[place] = token
        self._counts[place] += 1
        self._counted.append(token)

    def _forget(self) -> None:
        """Uncount the last token that was counted."""
        token = self._counted.pop()
        place = self._place[token]
        self._counts[place] -= 1
        if place >= self._known and not self._counts[place]:
            del self._place[token]  # the one that came last, since tokens are forgotten in the opposite order

    def _grow(self) -> None:
        more = len(self._ids)
        self._ids = np.append(self._ids, np.zeros(more, np.int64))
        self._counts = np.append(self._counts, np.zeros(more, np.float32))
        self._added = np.append(self._added, np.zeros(more, np.float32))
        self._repeated = np.append(self._repeated, np.zeros(more, bool))
        self._most = np.append(self._most, np.full(more, np.inf, np.float32))


@contextmanager
def adjusted(logits: np.ndarray, adjustments: Sequence[Adjustment | None]) -> Iterator[np.ndarray]:
    """Inside the block, give the adjusted rows, float32 [rows, vocabulary]; afterwards, restore the bits of `logits`.

    Args:
        logits: float32 [rows, vocabulary], copied where there are masks, otherwise changed in place meanwhile, since
            few entries change.
        adjustments: one per row; ids beyond the vocabulary (a draft model's may be smaller) are ignored.
    """
    some = [(row, a) for row, a in enumerate(adjustments) if a is not None]
    if not some:
        yield logits
        return
    rows = np.repeat([row for row, _ in some], [len(a.ids) for _, a in some]).astype(np.int64)
    ids, terms = np.concatenate([a.ids for _, a in some]), np.concatenate([a.terms for _, a in some], 1)
    if ids.max(initial=0) >= logits.shape[1]:
        there = ids < logits.shape[1]
        rows, ids, terms = rows[there], ids[there], terms[:, there]
    masks = [None if a is None or a.mask is None else a.mask.bits for a in adjustments]
    # What is not allowed is -inf whatever else is done to it.
    changed = choosing.masked(logits, masks) if any(mask is not None for mask in masks) else logits
    own = changed[rows, ids]
    changed[rows, ids] = _apply(own, terms)
    try:
        yield changed
    finally:
        if changed is logits:
            logits[rows, ids] = own


def adjusted_row(row: np.ndarray, adjustment: Adjustment | None) -> np.ndarray:
    """Return an adjusted copy of a row, float32 [vocabulary], or the row itself without an adjustment."""
    if adjustment is None:
        return row
    row, ids = row.copy(), adjustment.ids
    row[ids] = _apply(row[ids], adjustment.terms)
    if adjustment.mask is not None:
        row[~adjustment.mask.allowed(len(row)) & ~np.isnan(row)] = -np.inf
    return row


def _apply(x: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Apply terms, float32 [5, n], to entries, float32 [n], with one rounding per step, as in `reference`."""
    added, factor, by_count, by_presence, most = terms
    with np.errstate(all="ignore"):  # a broken model's are infinite, or no numbers
        x = x + added
        x = np.where(x < 0, x * factor, x / factor)
        found: np.ndarray = np.minimum(x - by_count - by_presence, most)
    return found
