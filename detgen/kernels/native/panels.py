"""Weights of linear layers as linear.h reads them: in panels of 32 columns, as they are or in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from detgen.kernels.native.quantizing import Quantized, fits, quantize

PANEL = 32


class Storage(IntEnum):
    """Number formats of weights; all are widened to float32 when they are read."""

    FLOAT = 0
    BFLOAT = 1
    HALF = 2
    BYTE = 3
    NIBBLE = 4


STORAGE = {torch.float32: Storage.FLOAT, torch.bfloat16: Storage.BFLOAT, torch.float16: Storage.HALF}
_BLOCK = 1 << 22  # entries that are rearranged at a time


class Panels(NamedTuple):
    """A linear layer's weight.

    Attributes:
        weight: [panels, inputs, PANEL], zeros behind the last column; of 4 bits [panels, inputs, PANEL / 2].
        scales: float32 [panels, inputs / GROUP, PANEL]; None for weights without.
        columns: those of all panels.
        inputs: of the layer.
        storage: number format.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    columns: int
    inputs: int
    storage: Storage

    def fields(self) -> dict[str, Any]:
        """Those of a step."""
        return self._asdict()


def panels(weights: Sequence[torch.Tensor | Quantized], columns: int = PANEL, bits: int = 0) -> Panels:
    """One weight of several.

    Args:
        weights: [outputs, inputs] each; what is quantized stays as it is if all of them are so.
        columns: how many columns of each of the weights stand in a panel, which has some of all of them; PANEL puts the
            weights one behind the other.
        bits: 8 or 4 to quantize them, where they fit; 0 leaves them as they are.
    """
    found = _quantized(weights, bits)
    if not found:
        packed = _arranged(_alike(weights), columns)
        return Panels(packed, None, packed.shape[0] * PANEL, packed.shape[1], STORAGE[packed.dtype])
    packed = _arranged([one.whole for one in found], columns)
    scales = _arranged([one.scales for one in found], columns)
    count, inputs, _ = packed.shape
    if found[0].bits == 8:
        return Panels(packed, scales, count * PANEL, inputs, Storage.BYTE)
    low, high = (packed + 8).to(torch.uint8).chunk(2, dim=-1)
    return Panels(low | high << 4, scales, count * PANEL, inputs, Storage.NIBBLE)


def joined(
    weights: Sequence[torch.Tensor | Quantized], biases: list[torch.Tensor], bits: int = 0, *, gated: bool = False
) -> dict[str, Any]:
    """Linear layers that read the same input, as one: behind each other, or a gate and what it opens in pairs.

    Args:
        weights: [outputs, inputs] each.
        biases: [outputs] each; none if they have none.
        bits: 8 or 4 to quantize them, where they fit; 0 leaves them as they are.
        gated: whether there is a gate and what it opens, one of both if there is one weight.
    """
    columns = PANEL
    if gated:
        columns = PANEL // 2
        if len(weights) == 1:
            weights, biases = _halves(weights[0]), [part for bias in biases for part in bias.chunk(2)]
    packed = panels(weights, columns, bits)
    if not biases:
        return packed.fields()
    return {**packed.fields(), "bias": panels([bias[:, None] for bias in biases], columns).weight.float().flatten()}


def stacked(experts: list[list[torch.Tensor]], columns: int, bits: int = 0) -> dict[str, Any]:
    """The weights of experts, one behind the other; arguments of each as `panels`'."""
    first = panels(experts[0], columns, bits)
    weight = first.weight.new_empty(len(experts), *first.weight.shape)
    scales = None if first.scales is None else first.scales.new_empty(len(experts), *first.scales.shape)
    for i, weights in enumerate(experts):
        packed = panels(weights, columns, bits)
        weight[i] = packed.weight
        if scales is not None and packed.scales is not None:
            scales[i] = packed.scales
    return {**first.fields(), "weight": weight, "scales": scales}


def _halves(weight: torch.Tensor | Quantized) -> list[torch.Tensor | Quantized]:
    if isinstance(weight, Quantized):
        return [weight.rows(part) for part in torch.arange(weight.shape[0]).chunk(2)]
    return list(weight.chunk(2))


def _quantized(weights: Sequence[torch.Tensor | Quantized], bits: int) -> list[Quantized]:
    """All of the weights in the same few bits; empty if they are not to be."""
    found = [w for w in weights if isinstance(w, Quantized)]
    if found:
        return found if len(found) == len(weights) and len({w.bits for w in found}) == 1 else []
    return [quantize(w, bits) for w in weights if isinstance(w, torch.Tensor)] if bits and fits(weights[0]) else []


def _alike(weights: Sequence[torch.Tensor | Quantized]) -> list[torch.Tensor]:
    """The weights in one dtype, as they are if they have one."""
    found = [w.weight() if isinstance(w, Quantized) else w for w in weights]
    return found if len({w.dtype for w in found}) == 1 else [w.float() for w in found]


def _arranged(weights: list[torch.Tensor], columns: int) -> torch.Tensor:
    """[panels, inputs, PANEL]."""
    if columns != PANEL:
        count = -(-weights[0].shape[0] // columns)
        order = [_padded(w, count * columns).reshape(count, columns, -1) for w in weights]
        joined = torch.cat(order, dim=1)
    else:
        whole = torch.cat(weights) if len(weights) > 1 else weights[0]
        joined = _padded(whole, -(-whole.shape[0] // PANEL) * PANEL).reshape(-1, PANEL, whole.shape[1])
    count, _, inputs = joined.shape
    packed = torch.empty(count, inputs, PANEL, dtype=joined.dtype)
    step = max(_BLOCK // (PANEL * inputs), 1)
    for first in range(0, count, step):
        packed[first : first + step] = joined[first : first + step].transpose(1, 2)
    return packed


def _padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - weight.shape[0]
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight
