"""Log-probabilities of the chosen and of the most likely tokens, for requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch

from detgen.engine.request import TokenLogprobs


def token_logprobs(logprobs: torch.Tensor, chosen: list[float], wanted: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the most likely ones.

    Args:
        logprobs: float32 [rows, vocabulary].
        chosen: log-probability of each row's chosen token.
        wanted: how many of the most likely tokens; ties are ordered by id.
    """
    tops = [_most_likely(row, wanted) for row in logprobs.cpu().numpy()]
    return [TokenLogprobs(own, top) for own, top in zip(chosen, tops, strict=True)]


def _most_likely(row: np.ndarray, wanted: int) -> tuple[tuple[int, float], ...]:
    """Id and value of the `wanted` largest entries, largest first."""
    wanted = min(wanted, len(row))
    if not wanted:
        return ()
    ids = np.flatnonzero(~(row < np.partition(row, -wanted)[-wanted]))  # all of them if a broken model gives NaN
    ids = ids[np.argsort(-row[ids], kind="stable")[:wanted]]
    return tuple(zip(ids.tolist(), row[ids].tolist(), strict=True))
