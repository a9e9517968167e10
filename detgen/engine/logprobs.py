"""Log-probabilities that a request wants beside its tokens."""

from __future__ import annotations

import torch

from detgen.engine.request import TokenLogprobs


def token_logprobs(logprobs: torch.Tensor, chosen: list[float], wanted: int) -> list[TokenLogprobs]:
    """Those of the chosen tokens, and of the most likely ones.

    Args:
        logprobs: float32 [rows, vocabulary].
        chosen: of each row's own token.
        wanted: how many of the most likely tokens; equal ones stand in the order of their ids.
    """
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)  # topk keeps no order of equal ones
    tops = zip(ids[:, :wanted].tolist(), values[:, :wanted].tolist(), strict=True)
    return [TokenLogprobs(own, tuple(zip(some, of, strict=True))) for own, (some, of) in zip(chosen, tops, strict=True)]
