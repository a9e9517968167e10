"""Weights in few bits: whole numbers times a scale that a group of inputs shares.

What is quantized here is llama.cpp's Q8_0 and Q4_0: scales are float16 numbers, each of 32 inputs. A quantized weight,
dequantized and quantized again, stays as it is. Files may have others (`Scales`), minima that are added, and whole
numbers that stand for codes: bitsandbytes' formats do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from detgen.program.operands import GROUP, Scales
from detgen.program.storage import Storage, numbers

MADE = {8: Storage.BYTE, 4: Storage.NIBBLE}  # of what is quantized here, by its bits
_AT_A_TIME = 1 << 18  # entries that are quantized while they are in a processor's cache


class Quantized(NamedTuple):
    """Weights in few bits.

    Each is its whole number, or the code of it, times its group's scale, rounded to float32, plus the group's minimum,
    rounded again.

    Attributes:
        whole: int8 [outputs, inputs], as many as `storage` has.
        scales: [outputs, groups].
        storage: how it is stored.
        codes: float32 [16], those of -8 to 7; None where whole numbers are what they are.
    """

    whole: torch.Tensor
    scales: Scales
    storage: Storage
    codes: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """That of the weights."""
        return self.whole.shape

    def rows(self, chosen: slice | torch.Tensor) -> Quantized:
        """Some outputs."""
        return self._replace(whole=self.whole[chosen], scales=self.scales.each(lambda x: x[chosen]))

    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        scales, minima = self.scales.floats()
        groups = numbers(self.whole, self.codes).unflatten(-1, (-1, self.scales.group)) * scales[..., None]
        weight: torch.Tensor = (groups if minima is None else groups + minima[..., None]).flatten(-2)
        return weight


def quantize(weight: torch.Tensor, bits: int) -> Quantized:
    """[outputs, inputs] in few bits, by the largest magnitude of each group.

    With 8 bits, that becomes 127 or -127; with 4, it becomes -8, so that 7 is the largest number of the other sign.
    """
    outputs, inputs = weight.shape
    whole = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.half)
    step = max(_AT_A_TIME // inputs, 1)
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        groups = weight[rows].float().reshape(-1, inputs // GROUP, GROUP)
        scales[rows] = _largest(groups, bits) / (127 if bits == 8 else -8)
        scale = scales[rows].float()
        made = (groups * torch.where(scale == 0, 0.0, 1 / scale)[..., None]).round_()
        whole[rows] = (made.clamp_(-127, 127) if bits == 8 else made.clamp_(-8, 7)).view(-1, inputs)
    return Quantized(whole, Scales(steps=scales, storage=Storage.HALF), MADE[bits])


def _largest(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Of each group, the largest magnitude; with 4 bits the first number that has it."""
    high, low = groups.amax(-1), groups.amin(-1)
    if bits == 8:
        return torch.maximum(high, -low).abs()
    found = torch.where(high > -low, high, low)
    equal = (high == -low).nonzero(as_tuple=True)
    some = groups[equal]
    found[equal] = some.gather(-1, some.abs().argmax(-1, keepdim=True))[:, 0]
    return found


def fits(weight: torch.Tensor | Quantized) -> bool:
    """Whether a weight, [outputs, inputs], has whole groups of inputs."""
    return len(weight.shape) == 2 and weight.shape[1] % GROUP == 0


def narrowed(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """float32, what becomes of a weight in that many bits; as it is if it does not fit, or with 0 bits."""
    return quantize(weight, bits).weight() if bits and fits(weight) else weight.float()
