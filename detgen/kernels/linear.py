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
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

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


class _Joined:
    """One product for sibling layers that read the same input: query, key and value; gate and up.

    The first sibling called with an input computes all of them, the others take their columns of the same result.
    """

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self._input: torch.Tensor | None = None
        self._waiting = 0
        self._output: torch.Tensor | None = None

    def columns(self, x: torch.Tensor, first: int, last: int, siblings: int) -> torch.Tensor:
        """Columns first..last-1 of the product; the result is let go when all siblings have taken theirs."""
        if self._input is not x or self._output is None:
            self._input, self._output, self._waiting = x, self.packed(x), siblings
        out = self._output[..., first:last]
        self._waiting -= 1
        if not self._waiting:
            self._input = self._output = None
        return out


class JoinedLinear(nn.Module):
    """One of the siblings of a joined product."""

    def __init__(self, joined: _Joined, first: int, last: int, siblings: int) -> None:
        super().__init__()
        self.joined = joined
        self.out_features = last - first
        self._span = (first, last, siblings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., last - first]."""
        return self.joined.columns(x, *self._span)


# Children that transformers' models call one after the other on the same tensor.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer of `model` by a packed one, siblings by one joined product, in place.

    Quantized layers (other classes) stay. An embedding that shares its weight with the output layer keeps it.

    Returns:
        How many layers were replaced.
    """
    found = {name: (weight, bias) for name, weight, bias in _linears(model) if can_pack(weight)}
    count = len(found)
    for parent in sorted({name.rpartition(".")[0] for name in found}):
        for names in _SIBLINGS:
            paths = [f"{parent}.{n}" for n in names]
            if all(p in found for p in paths) and _joinable([found[p] for p in paths]):
                _join(model.get_submodule(parent), names, [found.pop(p) for p in paths])
    for name, (weight, bias) in found.items():
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, PackedLinear(weight, bias))
    return count


_Layer = tuple[torch.Tensor, torch.Tensor | None]


def _joinable(layers: list[_Layer]) -> bool:
    """Same input size and dtype, and all or none with a bias."""
    return len({(w.shape[1], w.dtype, b is None) for w, b in layers}) == 1


def _join(owner: nn.Module, names: tuple[str, ...], layers: list[_Layer]) -> None:
    biases = [b for _, b in layers if b is not None]
    joined = _Joined(PackedLinear(torch.cat([w for w, _ in layers]), torch.cat(biases) if biases else None))
    first = 0
    for name, (weight, _) in zip(names, layers, strict=True):
        setattr(owner, name, JoinedLinear(joined, first, first + weight.shape[0], len(names)))
        first += weight.shape[0]
