"""Linear layers whose rows do not depend on how many rows there are.

Promise: for every row count of the class that the probe found, a row of the result has the same bits.

On the CPU the weight is reordered once for oneDNN, whose blocked product keeps one order of summation over a wide
range of row counts, where the MKL product behind `F.linear` changes kernels at 2, 8 and 16 rows. The reordered
product is also 2 to 3 times as fast at 4 to 128 rows. On other devices, and where oneDNN lacks the data type, the
module stays as it is and the probe decides which row counts agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_PACK_ROWS = 64  # row count for which oneDNN lays the weight out; the layout serves every count of the class


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` on a weight reordered for oneDNN.

    Args:
        weight: [out_features, in_features], float32 or bfloat16, on the CPU.
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
        self.bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        """Shape, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _linears(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Name, weight [out, in] and bias of each plain linear layer, GPT-2's transposed `Conv1D` among them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module.weight, module.bias
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            yield name, module.weight.t(), module.bias


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can reorder this weight here: on the CPU, in float32, or bfloat16 where the processor has it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer of `model` by a `PackedLinear`, in place.

    Quantized layers (other classes) stay. An embedding that shares its weight with the output layer keeps it.

    Returns:
        How many layers were replaced.
    """
    found = [(name, weight, bias) for name, weight, bias in _linears(model) if can_pack(weight)]
    for name, weight, bias in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(weight, bias))
    return len(found)
