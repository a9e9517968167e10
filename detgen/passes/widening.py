"""Lets a model compute in float32 whose weights are stored in fewer bits, or will be, or lie in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from detgen.kernels.native.quantizing import narrowed
from detgen.passes.stored import Read, taken, whole

_AT_A_TIME = 1 << 22  # entries of a linear layer that are widened at a time


@contextmanager
def widened(model: nn.Module, read: Read, bits: int = 0) -> Iterator[None]:
    """Inside the block, modules compute with their own parameters in float32, one module's at a time or less.

    Of the embedding only the rows that are asked for are read, and of a linear layer some rows at a time.

    Args:
        model: a decoder, or a part of one.
        read: gives the weight of a parameter.
        bits: 8 or 4 for linear layers and experts as they will be quantized; 0 leaves them as they are.
    """
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not any(p.dtype.itemsize == 2 or p.device.type == "meta" or bits for p in own.values()):
                continue
            if type(module) is nn.Linear:
                few = 0 if name.endswith("shared_expert_gate") else bits  # kept like a router
                module.__dict__["forward"] = partial(_product, module, read, few)
                hooks.callback(delattr, module, "forward")
                continue
            widen: Callable[..., Any] = partial(_widen, own, read, bits if _has_products(module) else 0)
            if module is embedding:
                widen = partial(_look_up, own["weight"], read)
                if isinstance(module, nn.Embedding):  # whose place in the table means something for gradients only
                    hooks.callback(setattr, module, "padding_idx", module.padding_idx)
                    module.padding_idx = None
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            hooks.callback(module.register_forward_hook(partial(_restore, own), always_call=True).remove)
        yield


def _has_products(module: nn.Module) -> bool:
    """Whether its weights are quantized: linear layers and experts, but not routers."""
    name = type(module).__name__
    return name == "Conv1D" or name.endswith("Experts")


def _product(linear: nn.Linear, read: Read, bits: int, x: torch.Tensor) -> torch.Tensor:
    """What a linear layer gives."""
    step = max(_AT_A_TIME // linear.in_features, 1)
    weight, given = linear._parameters["weight"], linear._parameters["bias"]
    assert weight is not None
    # Made first: small results between large weights that are freed would leave holes in the memory.
    made = x.new_empty(*x.shape[:-1], linear.out_features)
    for first in range(0, linear.out_features, step):
        rows = slice(first, first + step)
        bias = None if given is None else whole(read(given, rows)).float()
        made[..., rows] = F.linear(x, narrowed(whole(read(weight, rows)), bits), bias)
    return made


def _look_up(table: nn.Parameter, read: Read, module: nn.Module, args: Any) -> tuple[torch.Tensor]:
    """Give an embedding the rows that it is asked for; where they are in its table then."""
    ids, places = args[0].unique(return_inverse=True)
    rows = [whole(read(table, slice(i, i + 1))) for i in ids.tolist()]
    module.weight = nn.Parameter(torch.cat(rows).float(), requires_grad=False)
    return (places,)


def _widen(own: dict[str, nn.Parameter], read: Read, bits: int, module: nn.Module, args: Any) -> None:
    for name, parameter in own.items():
        data = _widened(taken(module, read(parameter)), bits, transposed=type(module).__name__ == "Conv1D")
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
