"""Elementwise functions that give a row the same bits at any place.

torch divides a large elementwise operation among its threads at any element, and the elements left over at the end of a
thread's part go through scalar code, in which SiLU, GELU and complex products round differently. If the parts end
between rows, every row is computed the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Elements per thread (at::internal::GRAIN_SIZE); GELU uses all threads from half of that.
_GRAIN = 32768


def _whole_rows(rows: int, columns: int, threads: int) -> int:
    """The most rows, up to `rows`, that torch divides between rows, however it counts the threads."""
    for n in range(rows, 0, -1):
        if n % threads == 0 and n % min(threads, -(-n * columns // _GRAIN)) == 0:
            return n
    return rows


def rowwise(function: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to tensors [rows, ...]; CPU threads divide the work between rows."""
    rows = xs[0].shape[0]
    size = xs[0].numel()
    if 2 * size <= _GRAIN or xs[0].device.type != "cpu":
        return function(*xs)
    n = _whole_rows(rows, size // rows, torch.get_num_threads())
    if n == rows:
        return function(*xs)
    return torch.cat([function(*(x[:n] for x in xs)), rowwise(function, *(x[n:] for x in xs))])


class RowwiseActivation(nn.Module):
    """An activation module that gives a row the same bits at any place."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., columns]."""
        return rowwise(self.activation, x.reshape(-1, x.shape[-1])).view(x.shape)
