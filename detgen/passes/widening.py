"""Lets a model compute in float32 whose weights are stored in fewer bits, or will be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from detgen.kernels.native.quantizing import narrowed


@contextmanager
def widened(model: nn.Module, bits: int = 0) -> Iterator[None]:
    """Inside the block, each module's own parameters are float32 while it runs: one module's at a time.

    Args:
        model: a decoder.
        bits: 8 or 4 for linear layers and experts as they will be quantized; 0 leaves them as they are.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            own = [(p, p.data) for p in module.parameters(recurse=False) if p.dtype.itemsize == 2 or bits]
            if own:
                widen = partial(_widen, own, bits if _has_products(module) else 0)
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(partial(_restore, own), always_call=True).remove)
        yield


def _has_products(module: nn.Module) -> bool:
    """Whether its weights are quantized: linear layers and experts, but not routers."""
    name = type(module).__name__
    return type(module) is nn.Linear or name == "Conv1D" or name.endswith("Experts")


def _widen(own: list[tuple[nn.Parameter, torch.Tensor]], bits: int, module: nn.Module, args: Any) -> None:
    for parameter, data in own:
        parameter.data = _widened(data, bits, transposed=type(module).__name__ == "Conv1D")


def _widened(data: torch.Tensor, bits: int, *, transposed: bool) -> torch.Tensor:
    if data.ndim == 3:
        return torch.stack([narrowed(weight, bits) for weight in data])
    if data.ndim == 2 and transposed:
        return narrowed(data.t().contiguous(), bits).t()
    return narrowed(data, bits)


def _restore(own: list[tuple[nn.Parameter, torch.Tensor]], module: nn.Module, args: Any, output: Any) -> None:
    for parameter, data in own:
        parameter.data = data
