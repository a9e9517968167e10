"""Whether rounding explains a token: could logits that are off by no more than so much have given it.

A filter drops what stands behind a boundary, and a rounding error moves tokens over it both ways: the token in
question may have been kept, and those ahead of it may have been dropped. So it is compared with those alone that are
kept whatever the error.
"""

from __future__ import annotations

import math

import torch

from detgen.kernels.noise import gumbel, words
from detgen.kernels.sampling import Choice


def rounding_explains(logits: torch.Tensor, choice: Choice, token: int, error: float) -> bool:
    """Whether a token could be the choice where differences of logits are off by `error` at most.

    Args:
        logits: float32 [vocabulary].
        choice: how the token was chosen.
        token: its id.
        error: not negative.
    """
    rows = logits.double().cpu()
    rows = rows - rows.max()
    if choice.temperature == 0:
        return bool(rows[token] >= -error)
    rows, error = rows / choice.temperature, error / choice.temperature
    if not _kept(rows, choice, error)[token]:
        return False
    noisy = rows + torch.from_numpy(gumbel(words(choice.seed, choice.sample, choice.position, len(rows))))
    certain = noisy[_kept(rows, choice, -error)]
    return not len(certain) or bool(noisy[token] >= certain.max() - error)


def _kept(rows: torch.Tensor, choice: Choice, slack: float) -> torch.Tensor:
    """Tokens that the filters keep, bool [vocabulary]; the boundaries stand lower by `slack`, or higher if negative."""
    ordered, ids = torch.sort(rows, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    width = len(ordered)
    if 0 < choice.top_k < width:
        boundary = ordered[choice.top_k - 1 if slack >= 0 else choice.top_k]  # the last one kept, the first one dropped
        kept &= ordered >= boundary - slack
        width = choice.top_k
    if choice.top_p < 1:
        kept &= _mass_before(ordered, width, slack) < choice.top_p
    if choice.min_p:
        kept &= ordered >= ordered[0] + math.log(choice.min_p) - slack
    return torch.zeros_like(kept).scatter_(0, ids, kept)


def _mass_before(ordered: torch.Tensor, width: int, slack: float) -> torch.Tensor:
    """Probability of the tokens before each, of the `width` first: the least for a positive slack, else the most.

    Tokens within the slack may stand on either side; the odds of those before against the others change by as much.
    """
    share = torch.exp(ordered - torch.logsumexp(ordered[:width], dim=0))
    total = torch.cat([share.new_zeros(1), torch.cumsum(share, dim=0)])
    count = torch.searchsorted(-ordered, -(ordered + slack), right=slack < 0)
    before = (total[count] - (share if slack < 0 else 0)).clamp(max=1)
    weight = before * math.exp(-slack)
    return weight / (weight + 1 - before)
