"""Numbers in memory: numpy arrays, which the compiled library reads, torch tensors that share the memory, and bits.

Whatever runs on a CPU uses arrays, so that it does not need torch, whose import takes longer than the rest of a run's
start. Kernels in Triton, transformers' own forwards and the interpreter compute with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from detgen.interruption import interrupted_later
from detgen.program.operands import is_array, name_of

if TYPE_CHECKING:
    import torch


Array: TypeAlias = Any  # a numpy array or a tensor

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def array(x: Any) -> np.ndarray:
    """Return a tensor as an array, sharing its memory if it is on the CPU; return an array unchanged.

    A tensor on torch's `meta` device, which has no numbers, becomes a `placeholder`.
    """
    if isinstance(x, np.ndarray):
        return x
    if x.device.type == "meta":
        return placeholder(tuple(x.shape), np.dtype(name_of(x.dtype)))
    import torch

    x = x.detach().cpu()
    found: np.ndarray = x.view(torch.uint16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()
    return found


def import_torch() -> Any:
    """Import torch, holding back interrupts meanwhile, and return it."""
    with interrupted_later():
        import torch
    return torch


def tensor(x: Any) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; return a tensor unchanged."""
    import torch

    if isinstance(x, torch.Tensor):
        return x
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype for a number format."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def floats(x: np.ndarray) -> np.ndarray:
    """Return the array in float32, copied only if it must be converted."""
    return x.astype(np.float32, copy=False)


def placeholder(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array that takes no memory: only its shape and number format mean anything."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def taken(x: np.ndarray, order: np.ndarray | slice) -> np.ndarray:
    """Return rows of an array in an order; for a placeholder, another placeholder."""
    if isinstance(order, np.ndarray) and x.size and not any(x.strides):
        return placeholder((len(order), *x.shape[1:]), x.dtype)
    return x[order]


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a step, or the value of one of its fields, with `change` applied to each array in it."""
    if is_array(value):
        return change(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: each(getattr(value, f.name), change) for f in fields(value) if f.init})


def beside(x: np.ndarray, other: Array) -> Array:
    """Return an array where `other` is: unchanged for a numpy array, otherwise as a tensor on its device."""
    return x if isinstance(other, np.ndarray) else tensor(x).to(other.device)


def stacked(rows: Sequence[Array]) -> Array:
    """Stack rows that are all on one device."""
    if all(isinstance(row, np.ndarray) for row in rows):
        return np.stack([array(row) for row in rows])
    import torch

    return torch.stack([tensor(row) for row in rows])


def bits(x: Array) -> np.ndarray:
    """Return the bits as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    found = array(x)
    return np.ascontiguousarray(found).view(_BITS[found.itemsize]).reshape(found.shape)


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same shape, number format and bits."""
    mine, other = array(a), array(b)
    return mine.shape == other.shape and mine.dtype == other.dtype and np.array_equal(bits(mine), bits(other))
