"""Elementwise functions that give a row the same bits wherever it stands.

torch divides a large elementwise operation among its threads at any element, and the elements that are left over at
the end of a thread's part go through scalar code, in which SiLU, GELU and complex products round otherwise. Divided
between rows, every row goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Elements a thread: torch starts one for every so many (at::internal::GRAIN_SIZE); GELU starts all of them above half.
_GRAIN = 32768


def _whole_rows(rows: int, columns: int, threads: int) -> int:
    """The most rows, up to `rows`, that torch divides between rows, whichever way it counts the threads."""
    for n in range(rows, 0, -1):
        if n % threads == 0 and n % min(threads, -(-n * columns // _GRAIN)) == 0:
            return n
    return rows


def rowwise(function: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    """An elementwise function of tensors [rows, ...], on the CPU divided among threads between rows."""
    rows = xs[0].shape[0]
    size = xs[0].numel()
    if 2 * size <= _GRAIN or xs[0].device.type != "cpu":
        return function(*xs)
    n = _whole_rows(rows, size // rows, torch.get_num_threads())
    if n == rows:
        return function(*xs)
    return torch.cat([function(*(x[:n] for x in xs)), rowwise(function, *(x[n:] for x in xs))])


class RowwiseActivation(nn.Module):
    """An activation module, row by row the same."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., columns]."""
        return rowwise(self.activation, x.reshape(-1, x.shape[-1])).view(x.shape)
