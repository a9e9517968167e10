"""Linear layers whose rows do not depend on how many rows there are.

Promise: for every row count of the class that the probe found, a row of the result has the same bits.

On the CPU the weight is reordered once for oneDNN, whose blocked product keeps one order of summation over a wide range
of row counts, while the MKL product that `F.linear` calls changes kernels at 2, 8 and 16 rows. The reordered product is
also 2 to 3 times as fast at 4 to 128 rows. On other devices, and if oneDNN does not support the data type, the module
stays as it is and the probe decides which row counts agree.
"""

from __future__ import annotations

import torch
from torch import nn

_SAMPLE = 32  # weight rows that are kept as they are
_PREPACK_ROWS = 64  # row count for which oneDNN lays the weight out; the layout serves every count of the class


class PrepackedLinear(nn.Module):
    """`x @ weight.T + bias` on a weight reordered for oneDNN.

    Args:
        weight: [out_features, in_features], float32 or bfloat16, on the CPU.
        bias: [out_features] or None.

    Attributes:
        sample: some rows of the weight, for `kernels.probe.Product`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.sample = weight_sample(weight)
        self.prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PREPACK_ROWS)
        self.bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.prepacked, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """Shape, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def weight_sample(weight: torch.Tensor) -> torch.Tensor:
    """A few rows of a weight, spread over all of it."""
    return weight.detach()[:: max(len(weight) // _SAMPLE, 1)][:_SAMPLE].clone()


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can reorder this weight: on the CPU, in float32, or in bfloat16 if the processor supports it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Joined:
    """One product for sibling layers that read the same input: query, key and value; gate and up.

    The first sibling called with an input computes all of them; the others take their columns of the same result.

    Args:
        linear: computes the product.
    """

    def __init__(self, linear: PrepackedLinear) -> None:
        self.linear = linear
        self._input: torch.Tensor | None = None
        self._waiting = 0
        self._output: torch.Tensor | None = None

    def columns(self, x: torch.Tensor, first: int, last: int, siblings: int) -> torch.Tensor:
        """Columns first..last-1 of the product; the result is released when all siblings have taken theirs."""
        if self._input is not x or self._output is None:
            self._input, self._output, self._waiting = x, self.linear(x), siblings
        out = self._output[..., first:last]
        self._waiting -= 1
        if not self._waiting:
            self._input = self._output = None
        return out


class JoinedLinear(nn.Module):
    """One of the siblings of a joined product."""

    def __init__(self, joined: Joined, first: int, last: int, siblings: int) -> None:
        super().__init__()
        self.joined = joined
        self.out_features = last - first
        self._span = (first, last, siblings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., last - first]."""
        return self.joined.columns(x, *self._span)
