"""Activations that give a row the same bits wherever it stands.

torch divides a large elementwise operation among its threads at any element, and the elements that are left over at
the end of a thread's part go through scalar code, in which SiLU and GELU round otherwise. Divided between rows, every
row goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Elements a thread: torch starts one for every so many (at::internal::GRAIN_SIZE); GELU starts all of them above half.
_GRAIN = 32768
_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def _whole_rows(rows: int, columns: int, threads: int) -> int:
    """The most rows, up to `rows`, that torch divides between rows, whichever way it counts the threads."""
    for n in range(rows, 0, -1):
        if n % threads == 0 and n % min(threads, -(-n * columns // _GRAIN)) == 0:
            return n
    return rows


def rowwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of x, [..., columns], on the CPU divided among threads between rows."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    if 2 * rows * columns <= _GRAIN or x.device.type != "cpu":
        return function(x)
    n = _whole_rows(rows, columns, torch.get_num_threads())
    if n == rows:
        return function(x)
    flat = x.reshape(rows, columns)
    return torch.cat([function(flat[:n]), rowwise(function, flat[n:])]).view(x.shape)


class RowwiseActivation(nn.Module):
    """An activation module, row by row the same."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., columns]."""
        return rowwise(self.activation, x)


def align_activations(model: nn.Module) -> int:
    """Replace the activation modules of `model`, in place; returns how many."""
    found = [(name, m) for name, m in model.named_modules() if type(m).__module__ in _MODULES]
    for name, activation in found:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, RowwiseActivation(activation))
    return len(found)
