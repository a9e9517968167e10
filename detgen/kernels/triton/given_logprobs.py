"""Log-probabilities of tokens that are given.

Promise: that of a row depends on its logits and on its token alone, and has the bits of docs/numerics.md. Two launches:
one reads the rows (`reading`), the other puts together what was found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS, on
from detgen.kernels.triton.row_reading import log_total, read


@triton.jit
def _given(logits, tokens, tops, totals, out, stride, blocks):
    row = tl.program_id(0).to(tl.int64)
    largest, log = log_total(tops + row * blocks, totals + row * blocks, blocks)
    logit = tl.load(logits + row * stride + tl.load(tokens + row))
    tl.store(out + row, tl.where(largest < float("inf"), logit - largest - log, float("nan")))


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's token.

    Args:
        logits: as those of `sampling.choose`.
        tokens: int64 [rows], on the same device.

    Returns:
        float32 [rows]; NaN where the largest logit is not finite.
    """
    with on(logits.device):
        found = read(logits, None)
        out = torch.empty(len(logits), device=logits.device)
        blocks = found.tops.shape[1]
        _given[(len(logits),)](logits, tokens, found.tops, found.totals, out, logits.stride(0), blocks, **OPTIONS)
    return out
