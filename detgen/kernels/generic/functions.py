"""Functions of torch that a model's own forward calls, computed in the arithmetic `detgen-2` instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from detgen.kernels.c.modules import NativeLinear, NativeNorm, by_activation, by_softmax, by_sum
from detgen.program.operands import Activation

_SUM, _SOFTMAX = by_sum(), by_softmax()
_LAST = (-1,)


class NativeFunctions(TorchFunctionMode):
    """Inside the block, known functions are computed natively; calls with unexpected arguments go to torch."""

    def __init__(self) -> None:
        super().__init__()
        self._linears: dict[int, tuple[nn.Parameter, NativeLinear]] = {}
        self._norms: dict[object, tuple[list[torch.Tensor | None], NativeNorm]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            found = self._linear(*args, **kwargs)
        elif func is F.layer_norm or func is F.rms_norm:
            found = self._norm(*args, **kwargs, centred=func is F.layer_norm)
        else:
            own = _FUNCTIONS.get(func)
            fits = own is not None and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32
            found = own(*args, **kwargs) if own is not None and fits else NotImplemented
        return func(*args, **kwargs) if found is NotImplemented else found

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if not isinstance(weight, nn.Parameter) or x.dtype != torch.float32:  # others may be gone by the next pass
            return NotImplemented
        if id(weight) not in self._linears:
            self._linears[id(weight)] = weight, NativeLinear(weight, bias)
        return self._linears[id(weight)][1](x)

    def _norm(
        self,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        centred: bool,
    ) -> Any:
        own = [weight, bias]
        fits = all(p is None or isinstance(p, nn.Parameter) for p in own) and (weight is not None or bias is None)
        if not fits or len(normalized_shape) != 1 or x.dtype != torch.float32:
            return NotImplemented
        epsilon = eps if eps is not None else 1e-5 if centred else torch.finfo(torch.float32).eps
        key = *map(id, own), normalized_shape[0], epsilon, centred
        if key not in self._norms:
            self._norms[key] = own, NativeNorm(normalized_shape[0], weight, bias, epsilon, centred=centred)
        return self._norms[key][1](x)


def _elementwise(activation: Activation) -> Callable[..., Any]:
    function = by_activation(activation)

    def compute(x: torch.Tensor, inplace: bool = False) -> Any:
        return NotImplemented if inplace or not x.ndim else function(x)

    return compute


def _gelu(x: torch.Tensor, approximate: str = "none") -> Any:
    return _GELUS[approximate](x)


def _softmax(x: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if dim is None or dim not in (-1, x.ndim - 1) or dtype not in (None, torch.float32):
        return NotImplemented
    return _SOFTMAX(x)


def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    last = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if last not in (_LAST, (x.ndim - 1,)) or dtype not in (None, torch.float32):
        return NotImplemented
    found = _SUM(x)
    return found if keepdim else found[..., 0]


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    found = _sum(x, dim, keepdim, dtype)
    return found if found is NotImplemented else found / x.shape[-1]


def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Compute topk by sorting, which orders equal entries; the argument names are torch's."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


_GELUS = {"none": _elementwise(Activation.GELU), "tanh": _elementwise(Activation.GELU_TANH)}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.gelu: _gelu,
    F.silu: _elementwise(Activation.SILU),
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid), _elementwise(Activation.SIGMOID)),
    **dict.fromkeys((torch.tanh, torch.Tensor.tanh, F.tanh), _elementwise(Activation.TANH)),
    **dict.fromkeys((torch.sqrt, torch.Tensor.sqrt), _elementwise(Activation.ROOT)),
    **dict.fromkeys((torch.rsqrt, torch.Tensor.rsqrt), _elementwise(Activation.RECIPROCAL_ROOT)),
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.sum, torch.Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, torch.Tensor.mean), _mean),
    **dict.fromkeys((torch.topk, torch.Tensor.topk), _topk),
}
