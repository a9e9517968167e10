"""Weights in few bits: whole numbers times a scale that a group of 32 inputs shares, as in llama.cpp's Q8_0 and Q4_0.

Scales are float16 numbers kept in float32. A quantized weight, dequantized and quantized again, stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 32  # inputs that share a scale


class Quantized(NamedTuple):
    """Weights in few bits; each is its whole number times its group's scale, rounded to float32.

    Attributes:
        whole: int8 [outputs, inputs].
        scales: float32 [outputs, inputs / GROUP].
        bits: 8 or 4.
    """

    whole: torch.Tensor
    scales: torch.Tensor
    bits: int

    @property
    def shape(self) -> torch.Size:
        """That of the weights."""
        return self.whole.shape

    def rows(self, chosen: slice | torch.Tensor) -> Quantized:
        """Some outputs."""
        return Quantized(self.whole[chosen], self.scales[chosen], self.bits)

    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        groups = self.whole.float().view(*self.scales.shape, GROUP) * self.scales[..., None]
        return groups.view(self.whole.shape)


def quantize(weight: torch.Tensor, bits: int) -> Quantized:
    """[outputs, inputs] in few bits, by the largest magnitude of each group.

    With 8 bits, that becomes 127 or -127; with 4, it becomes -8, so that 7 is the largest number of the other sign.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    place = groups.abs().argmax(-1, keepdim=True)
    most = groups.gather(-1, place)[..., 0]
    scales = (most.abs() / 127 if bits == 8 else most / -8).half().float()
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    whole = (groups * inverse[..., None]).round()
    whole = whole.clamp(-127, 127) if bits == 8 else whole.clamp(-8, 7)
    return Quantized(whole.to(torch.int8).view(weight.shape), scales, bits)


def fits(weight: torch.Tensor | Quantized) -> bool:
    """Whether a weight, [outputs, inputs], has whole groups of inputs."""
    return len(weight.shape) == 2 and weight.shape[1] % GROUP == 0


def narrowed(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """float32, what becomes of a weight in that many bits; as it is if it does not fit, or with 0 bits."""
    return quantize(weight, bits).weight() if bits and fits(weight) else weight.float()
