"""Choosing tokens: argmax of the logits, or of perturbed log-probabilities.

Promise: the token chosen for a row is a function of the row's logits, its parameters, its seed, its sample and its
position. Noise is counter-based: entry j of the vocabulary at position t is word j of the Philox4x64-10 stream with
key (seed, sample) and counter (j // 4, t, 0, 0) (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), so it depends neither on who draws it nor on what was drawn before. Adding Gumbel noise to the logits and
taking the argmax samples from their softmax (Maddison et al., "A* sampling", 2014, section 2); a drafter that uses
the same noise agrees with the target as often as the two distributions allow (arXiv 2408.07978).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose one row's token; see `SamplingParams` for the fields, which mean the same."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    position: int = 0


def gumbel(seed: int, sample: int, position: int, vocabulary: int) -> np.ndarray:
    """Gumbel(0, 1) noise, float64 [vocabulary], of one position of one sample."""
    counter = ((position << 64) - 1) % (1 << 256)  # numpy steps it before the first block
    generator = np.random.Philox(counter=counter, key=(sample << 64) | seed)
    uniform = ((generator.random_raw(vocabulary) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(np.minimum(uniform, 1 - 2.0**-53)))


def scores(logits: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
    """What the argmax is taken of: the logits at temperature 0, else filtered logits / temperature plus noise.

    Filters act in the order temperature, top_k, top_p, min_p; ties in top_k and top_p go to the lower token id.

    Args:
        logits: float32 [rows, vocabulary].
        choices: one a row.

    Returns:
        float64 [rows, vocabulary] on the CPU where any row is sampled, else `logits` as they are.
    """
    if all(c.temperature == 0 for c in choices):
        return logits
    result = logits.double()
    sampled = [i for i, c in enumerate(choices) if c.temperature > 0]
    some = [choices[i] for i in sampled]
    column = lambda values: torch.tensor(values, dtype=torch.float64)[:, None]  # noqa: E731
    rows = result[sampled].cpu()
    rows = (rows - rows.amax(-1, keepdim=True)) / column([c.temperature for c in some])
    if any(c.top_k or c.top_p < 1 for c in some):
        _keep_top(rows, some)
    if any(c.min_p for c in some):
        lead = column([math.log(c.min_p) if c.min_p else -math.inf for c in some])
        floor = rows.amax(-1, keepdim=True) + lead
        rows.masked_fill_(rows < floor, -torch.inf)
    width = rows.shape[-1]
    rows += torch.from_numpy(np.stack([gumbel(c.seed, c.sample, c.position, width) for c in some]))
    result[sampled] = rows.to(result.device)
    return result


def _keep_top(rows: torch.Tensor, choices: list[Choice]) -> None:
    """Set what top_k and top_p drop to -inf, in place; rows float64 [rows, vocabulary]."""
    width = rows.shape[-1]
    ordered, ids = torch.sort(rows, dim=-1, descending=True, stable=True)
    limit = torch.tensor([c.top_k or width for c in choices])[:, None]
    ordered.masked_fill_(torch.arange(width) >= limit, -torch.inf)
    share = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(share, dim=-1) - share
    # Rounding can bring the sum to 1 before the last entry: a row that has top_p off must not lose one for it.
    share_limit = torch.tensor([c.top_p if c.top_p < 1 else torch.inf for c in choices], dtype=torch.float64)[:, None]
    ordered.masked_fill_(before >= share_limit, -torch.inf)
    rows.scatter_(-1, ids, ordered)


def choose(score: torch.Tensor) -> torch.Tensor:
    """The best entry of each row of `scores`, int64 [rows]; ties go to the lowest id."""
    if score.device.type == "cpu":
        return torch.from_numpy(score.numpy().argmax(-1))  # 6 times as fast as torch's; the first of equal ones, too
    return torch.argmax(score, dim=-1)


def leads(score: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """How far the best entry of each row is ahead of the runner-up.

    Args:
        score: [rows, vocabulary], overwritten.
        best: int64 [rows], as `choose` returns.

    Returns:
        float64 [rows]; inf where there is no other candidate.
    """
    best = best[:, None]
    top = score.gather(-1, best)[:, 0].double()
    return top - score.scatter_(-1, best, -torch.inf).amax(-1).double()
