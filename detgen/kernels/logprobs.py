"""Log-probabilities of chosen tokens, and their margins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from detgen.kernels import choosing

if TYPE_CHECKING:
    from detgen.kernels.sampling import Chosen


class Judged(NamedTuple):
    """What some rows say about their tokens.

    Attributes:
        logprobs: float32 [rows, vocabulary]; None if only the chosen tokens' are wanted.
        chosen: float32 [rows], the chosen tokens' log-probabilities.
        margins: float64 [rows], the tokens' leads; inf where there was no other candidate.
    """

    logprobs: torch.Tensor | None
    chosen: np.ndarray
    margins: np.ndarray


class Scores(NamedTuple):
    """What is known of some rows.

    Attributes:
        tokens: int64 [rows], what they choose: the largest logits, the first of ties, unless others were asked for;
            anything where logits are not finite.
        leads: float64 [rows], over the next one.
        logprobs: float32 [rows].
        finite: bool [rows], whether the largest logit is finite and none is NaN.
    """

    tokens: np.ndarray
    leads: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray

    @classmethod
    def of(cls, scored: torch.Tensor) -> Scores:
        """From what the native pass says, float32 [rows, SCORED]."""
        found = scored.numpy()
        top, second, total = found[:, 0], found[:, 1], found[:, 2]
        tokens = found.view(np.int32)[:, 3].astype(np.int64)
        with np.errstate(invalid="ignore"):
            leads = top.astype(np.float64) - second + 0.0
        return cls(tokens, leads, 0 - total, np.isfinite(top) & ~np.isnan(total))

    def only(self, wanted: np.ndarray) -> Scores:
        """Those of some rows, a bool for each."""
        return Scores(*(values[wanted] for values in self))


def has_kernels(logits: torch.Tensor) -> bool:
    """Whether logits lie where kernels in Triton choose of them."""
    return logits.device.type == "cuda" and torch.version.cuda is not None


def judge_rows(logits: torch.Tensor, picked: Chosen, rows: np.ndarray | None = None, full: bool = False) -> Judged:
    """Judge some rows.

    Log-probabilities have the bits that docs/numerics.md states.

    Args:
        logits: float32 [all rows, vocabulary], no longer adjusted.
        picked: what was chosen of them.
        rows: int64 [rows], which to judge; None for all.
        full: whether the log-probabilities of whole rows are wanted.
    """
    if has_kernels(logits) and not full:
        known = picked.logprobs if picked.logprobs is not None else _given(logits, picked.tokens)
        wanted = slice(None) if rows is None else rows
        return Judged(None, known[wanted], picked.leads[wanted])
    if logits.device.type != "cpu":
        logits, picked = logits.cpu(), replace(picked, tokens=picked.tokens.cpu())
    chosen, logprobs = choosing.logprobs(logits, picked.tokens, rows, full=full)
    return Judged(logprobs, chosen, picked.leads.copy() if rows is None else picked.leads[rows])


def _given(logits: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """The log-probabilities of tokens, float32 [rows], on CUDA."""
    from detgen.kernels.triton.given_logprobs import logprobs

    found: np.ndarray = logprobs(logits, tokens).cpu().numpy()
    return found
