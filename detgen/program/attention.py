"""Attention in plain PyTorch: partial results of rows over some of their keys, and how these are joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from detgen.program.arithmetic import by_lanes, capped, exponential, fma, number
from detgen.program.operands import PAGE
from detgen.program.steps import Attend


class Attended(NamedTuple):
    """Partial results of rows over some of their keys.

    Attributes:
        most: [rows, heads], the largest score.
        total: [rows, heads], the sum of the weights.
        results: [rows, heads, values], the sums of the weighted values, not yet divided by `total`.
    """

    most: Tensor
    total: Tensor
    results: Tensor

    @classmethod
    def nothing(cls, *shape: int) -> Attended:
        """Return the partial results over no keys; `shape` is that of the results."""
        return cls(torch.full(shape[:-1], -torch.inf), torch.zeros(shape[:-1]), torch.zeros(shape))

    def joined(self, behind: Attended) -> Attended:
        """Join with the partial results over the keys that follow."""
        most = torch.where(behind.most > self.most, behind.most, self.most)
        a, b = (exponential(each.most - _finite(most)) for each in (self, behind))
        total = fma(behind.total, b, self.total * a)
        return Attended(most, total, fma(behind.results, b[..., None], self.results * a[..., None]))


def _finite(most: Tensor) -> Tensor:
    return most.where(most > -torch.inf, 0.0)


def of_block(step: Attend, keys: Tensor, values: Tensor, queries: Tensor, seen: Tensor, away: Tensor) -> Attended:
    """Return the partial results of queries over one block of keys.

    Args:
        step: gives scale, softcap, slopes and sizes.
        keys: [KV heads, entries, PAGE].
        values: [KV heads, PAGE, entries].
        queries: [rows, KV heads, group, entries].
        seen: bool [rows, 1, 1, PAGE], the keys that a row sees.
        away: int64 [rows, 1, 1, PAGE], the positions of the keys minus that of the row.
    """
    scores = torch.zeros(*queries.shape[:-1], PAGE)
    for d in range(step.cache.size):
        scores = fma(keys[:, None, d], queries[..., d, None], scores)
    scores = capped(scores * number(step.scale), step.softcap)
    if step.slopes is not None:
        scores = fma(step.slopes.view(*queries.shape[1:3], 1), away.float(), scores)
    scores = scores.where(seen, -torch.inf)
    most = scores.where(scores == scores, -torch.inf).amax(-1)
    weights = exponential(scores - _finite(most)[..., None])
    results = torch.zeros(*queries.shape[:-1], step.cache.values)
    for k in range(PAGE):
        results = fma(values[:, None, k], weights[..., k, None], results).where(seen[..., k, None], results)
    return Attended(most, by_lanes(weights), results)
