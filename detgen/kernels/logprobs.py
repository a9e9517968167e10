"""Log-probabilities of chosen tokens, and their margins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from detgen.kernels import choosing
from detgen.program.arrays import Array, array, tensor

if TYPE_CHECKING:
    from detgen.kernels.sampling import Chosen


class Judged(NamedTuple):
    """Log-probabilities and margins of some rows.

    Attributes:
        logprobs: float32 [n, vocabulary], of the rows for which all are wanted; None if there are none.
        chosen: float32 [rows], the chosen tokens' log-probabilities.
        margins: float64 [rows], the tokens' leads; inf where there was no other candidate.
    """

    logprobs: np.ndarray | None
    chosen: np.ndarray
    margins: np.ndarray


LIKELY = np.dtype([("token", "<i4"), ("logprob", "<f4")])


class Scores(NamedTuple):
    """The choices of some rows and their scores.

    Attributes:
        tokens: int64 [rows], the largest logits (the first of ties), unless others were asked for; anything where
            logits are not finite.
        leads: float64 [rows], leads over the next token.
        logprobs: float32 [rows], log-probabilities of the tokens.
        finite: bool [rows], whether the largest logit is finite and none is NaN.
        likely: LIKELY [rows, n], the most likely tokens, as many as a row asked for; None if none did.
    """

    tokens: np.ndarray
    leads: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray
    likely: np.ndarray | None = None

    @classmethod
    def of(cls, found: np.ndarray) -> Scores:
        """Make scores from what the native pass returns, float32 [rows, SCORED]."""
        top, second, total = found[:, 0], found[:, 1], found[:, 2]
        tokens = found.view(np.int32)[:, 3].astype(np.int64)
        with np.errstate(invalid="ignore"):
            leads = top.astype(np.float64) - second + 0.0
        return cls(tokens, leads, 0 - total, np.isfinite(top) & ~np.isnan(total))

    def only(self, wanted: np.ndarray) -> Scores:
        """Return the scores of some rows, given as a bool for each row or as row numbers."""
        made = Scores(*(values[wanted] for values in self[:4]))
        return made if self.likely is None else made._replace(likely=self.likely[wanted])


def most_likely(logprobs: np.ndarray, wanted: int) -> np.ndarray:
    """Return the `wanted` largest entries of each row, descending, ties by lower id; LIKELY [rows, wanted].

    Args:
        logprobs: float32 [rows, vocabulary].
        wanted: how many; all entries if there are fewer.
    """
    rows, vocabulary = logprobs.shape
    made = np.empty((rows, min(wanted, vocabulary)), LIKELY)
    if not made.size:
        return made
    last = np.partition(logprobs, -made.shape[1], axis=1)[:, -made.shape[1], None]
    # More than wanted if some are equal to the last; all of them if a broken model gives NaN.
    found = np.flatnonzero(~(logprobs < last))
    likely = logprobs.ravel()[found]
    at = found // vocabulary
    order = np.lexsort((-likely, at))
    best = order[np.searchsorted(at, np.arange(rows))[:, None] + np.arange(made.shape[1])]
    made["token"], made["logprob"] = found[best] % vocabulary, likely[best]
    return made


def has_kernels(logits: Array) -> bool:
    """Return whether logits are on a device where Triton kernels choose tokens."""
    if isinstance(logits, np.ndarray) or logits.device.type != "cuda":
        return False
    import torch

    return torch.version.cuda is not None


def of_tokens(logits: Array, tokens: Array) -> np.ndarray:
    """Return the logit of each row's token, float32 [rows]."""
    if isinstance(logits, np.ndarray):
        found: np.ndarray = logits[np.arange(len(logits)), tokens]
        return found
    return array(logits.gather(-1, tensor(tokens).to(logits.device)[:, None])[:, 0])


def judge_rows(
    logits: Array, picked: Chosen, rows: np.ndarray | None = None, whole: np.ndarray | None = None
) -> Judged:
    """Compute log-probabilities and margins of some rows.

    Log-probabilities have the bits that docs/numerics.md states. From CUDA, only the `whole` rows are copied.

    Args:
        logits: float32 [all rows, vocabulary], no longer adjusted.
        picked: the tokens chosen from them.
        rows: int64 [rows], the rows wanted; None for all.
        whole: int64 [n], those among them for which log-probabilities of all tokens are wanted; None for none.
    """
    at = np.arange(len(logits)) if rows is None else rows
    leads, every = picked.leads[at], None
    if picked.logprobs is not None and has_kernels(logits):
        there = tensor(logits)
        tokens = tensor(picked.tokens).to(there.device)
        if whole is not None:
            wanted = tensor(at[whole]).to(there.device)
            _, every = choosing.logprobs(array(there[wanted]), array(tokens[wanted]), None, full=True)
        return Judged(every, picked.logprobs[at], leads)
    logits = array(logits)
    if whole is not None and len(whole) < len(at):
        _, every = choosing.logprobs(logits, picked.tokens, at[whole], full=True)
        whole = None
    if picked.logprobs is not None and whole is None:
        return Judged(every, picked.logprobs[at], leads)
    chosen, all_of_them = choosing.logprobs(logits, picked.tokens, rows, full=whole is not None)
    return Judged(every if all_of_them is None else all_of_them, chosen, leads)
