"""Merges an adapter into the weights of a model while they are read; docs/numerics.md defines the sums."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from detgen.errors import EngineError
from detgen.models.adapter_files import Adapter
from detgen.models.folders import Tensor
from detgen.models.skeleton import is_torch
from detgen.models.stored import ALL, Place, Read, turned, whole
from detgen.models.wrappers import renaming
from detgen.program.arrays import array, floats, import_torch
from detgen.program.arrays import tensor as as_tensor
from detgen.program.operands import name_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_AT_A_TIME = 1 << 22  # entries of a weight merged at once


class _Change(NamedTuple):
    """A product of factors to add to a weight, [rows, columns].

    Attributes:
        left: [rows, rank]; [rank, rows] if `turned`.
        right: [rank, columns]; [columns, rank] if `turned`.
        turned: whether the weight has inputs before outputs.
        scale: multiplies the product.
    """

    left: Place
    right: Place
    turned: bool
    scale: float

    def on(self, weight: np.ndarray, rows: slice) -> np.ndarray:
        """Return merged rows, given these rows of the weight, in the weight's number format."""
        import_torch()
        from detgen.kernels.c.modules import NativeLinear

        left, right = _finite(self.left), _finite(self.right)
        left, right = (left.T[rows], right) if self.turned else (left[rows], right.T)
        product, made = NativeLinear(as_tensor(np.ascontiguousarray(right))), np.empty_like(weight)
        step, scale = max(_AT_A_TIME // weight.shape[1], 1), np.float32(self.scale)
        for first in range(0, len(weight), step):
            some = slice(first, first + step)
            part = array(product(as_tensor(np.ascontiguousarray(left[some]))))
            with np.errstate(over="ignore", invalid="ignore"):  # numbers too large for 16 bits become infinite
                made[some] = floats(weight[some]) + part * scale
        return made


def _finite(place: Place) -> np.ndarray:
    """Read a factor in float32, [outputs, rank] or [rank, inputs]; raise unless it is finite."""
    found = floats(whole(place.read()))
    if not np.isfinite(found).all():
        raise EngineError(f"{place.path}: {place.name} has numbers that are not finite: the adapter's training failed")
    return found


class Merging:
    """Reads the weights of a model with an adapter merged in, in the number formats that they have without it.

    Args:
        model: the model, with weights in floating point.
        read: reads its weights without the adapter.
        adapter: the adapter to merge.

    Raises:
        ValueError: if the adapter does not fit the model; names the module or the parameter.
    """

    def __init__(self, model: PreTrainedModel, read: Read, adapter: Adapter) -> None:
        self._read, self._folder = read, adapter.folder
        named, owners = renaming(model), defaultdict(list)
        parameters: dict[str, tuple[nn.Module, nn.Parameter]] = {}
        for name, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                full = f"{name}.{own}" if name else own
                parameters[full] = module, parameter
                owners[parameter].append(full)
        self._replaced: dict[nn.Parameter, Place] = {}
        self._changes: dict[nn.Parameter, _Change] = {}
        for name, tensor in adapter.replaced.items():
            found = parameters.get(named(name))
            if found is None:
                raise ValueError(f"{tensor.file}: the model has no weight {name}")
            _check(tensor, tuple(found[1].shape), tuple(tensor.shape), owners[found[1]])
            self._replaced[found[1]] = self._place(tensor)
        for name, (up, down, scale) in adapter.factors.items():
            module, weight = parameters.get(named(f"{name}.weight"), (None, None))
            if module is None or weight is None:
                raise ValueError(f"{up.file}: the model has no module {name}; is it the one that was adapted?")
            other = type(module).__name__ == "Conv1D" and turned(module)
            if not is_torch(module, "Linear") and not other:
                raise ValueError(f"{up.file}: {name} is a {type(module).__name__}, and only linear layers are merged")
            shape = (down.shape[1], up.shape[0]) if other else (up.shape[0], down.shape[1])
            _check(up, tuple(weight.shape), shape, owners[weight])
            left, right = (self._place(t) for t in ((down, up) if other else (up, down)))
            self._changes[weight] = _Change(left, right, other, scale)

    def _place(self, tensor: Tensor) -> Place:
        return Place(self._folder / tensor.file, tensor.dtype, tuple(tensor.shape), tensor.at, tensor.name)

    def __call__(self, parameter: nn.Parameter, rows: slice = ALL) -> np.ndarray:
        """Return the weight of a parameter, or some consecutive rows of it."""
        place, change = self._replaced.get(parameter), self._changes.get(parameter)
        if place is None:
            found = self._read(parameter, rows)
        else:
            with np.errstate(over="ignore"):
                found = whole(place.read(rows)).astype(name_of(parameter.dtype))
        return whole(found) if change is None else change.on(whole(found), rows)


def _check(tensor: Tensor, there: tuple[int, ...], given: tuple[int, ...], owners: list[str]) -> None:
    """Raise if a tensor does not fit a weight, or would change two modules that share the weight."""
    if there != given:
        raise ValueError(
            f"{tensor.file}: {tensor.name} is for a weight of {given}, and the model's is {there}; is it the one that"
            " was adapted?"
        )
    if len(owners) > 1:
        raise ValueError(
            f"{tensor.file}: {tensor.name} would change {' and '.join(owners)}, which share one weight; merge the"
            " adapter by PEFT, save the result with tie_word_embeddings false, and give that as --target"
        )
