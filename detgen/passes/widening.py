"""Lets a model compute in float32 whose weights are stored in fewer bits, or will be, or lie in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from detgen.kernels.native.quantizing import narrowed
from detgen.passes.stored import Read, whole


@contextmanager
def widened(model: nn.Module, read: Read, bits: int = 0) -> Iterator[None]:
    """Inside the block, each module's own parameters are float32 while it runs: one module's at a time.

    Args:
        model: a decoder.
        read: gives the weight of a parameter.
        bits: 8 or 4 for linear layers and experts as they will be quantized; 0 leaves them as they are.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            if any(p.dtype.itemsize == 2 or p.device.type == "meta" or bits for p in own.values()):
                widen = partial(_widen, own, read, bits if _has_products(module) else 0)
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(partial(_restore, own), always_call=True).remove)
        yield


def _has_products(module: nn.Module) -> bool:
    """Whether its weights are quantized: linear layers and experts, but not routers."""
    name = type(module).__name__
    return type(module) is nn.Linear or name == "Conv1D" or name.endswith("Experts")


def _widen(own: dict[str, nn.Parameter], read: Read, bits: int, module: nn.Module, args: Any) -> None:
    for name, parameter in own.items():
        data = _widened(whole(read(parameter)), bits, transposed=type(module).__name__ == "Conv1D")
        setattr(module, name, nn.Parameter(data, requires_grad=False))


def _widened(data: torch.Tensor, bits: int, *, transposed: bool) -> torch.Tensor:
    if data.ndim == 3:
        return torch.stack([narrowed(weight, bits) for weight in data])
    if data.ndim == 2 and transposed:
        return narrowed(data.t().contiguous(), bits).t()
    return narrowed(data, bits)


def _restore(own: dict[str, nn.Parameter], module: nn.Module, args: Any, output: Any) -> None:
    for name, parameter in own.items():
        setattr(module, name, parameter)
