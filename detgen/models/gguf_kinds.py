"""Types of tensors of GGUF files: their blocks, and the weights in them, which are those of the gguf package.

A file's header is read by this, too, so torch is imported when weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from detgen.program.operands import GROUP, UNIT, Scales
from detgen.program.storage import FORMATS, Storage, repeated

if TYPE_CHECKING:
    from torch import Tensor

    from detgen.kernels.c.quantizing import Quantized

_AT_A_TIME = 1 << 22  # entries


class Kind(NamedTuple):
    """A type.

    Attributes:
        name: llama.cpp's.
        entries: of a block.
        size: bytes of a block.
        storage: of whole numbers; None of numbers as they are.
        weights: makes blocks, uint8 [blocks, size], whole numbers, int8 [blocks, entries], and their scales,
            [blocks, groups].
    """

    name: str
    entries: int
    size: int
    storage: Storage | None = None
    weights: Callable[[Tensor], tuple[Tensor, Scales]] | None = None

    def read(self, blocks: Tensor) -> Quantized:
        """The weights in blocks of whole numbers, uint8 [blocks, size], as [blocks, entries].

        Raises:
            ValueError: if a scale is not finite.
        """
        import torch

        from detgen.kernels.c.quantizing import Quantized

        assert self.weights is not None
        assert self.storage is not None
        whole = torch.empty(len(blocks), self.entries, dtype=torch.int8)
        scales, step = None, _AT_A_TIME // self.entries
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            whole[part], some = self.weights(blocks[part])
            scales = scales or some.each(lambda x: x.new_empty(len(blocks), *x.shape[1:]))
            scales.each(lambda to, x, part=part: to[part].copy_(x), some)
        assert scales is not None
        if not all(bool(found.isfinite().all()) for found in scales.floats() if found is not None):
            raise ValueError("a scale is infinite or no number")
        return Quantized(whole, scales, self.storage)


def _halves(x: Tensor) -> Tensor:
    """Float16 numbers, uint8 [blocks, 2 n] -> [blocks, n]."""
    import torch

    return x.contiguous().view(torch.float16)


def _planes(x: Tensor, bits: int, together: int) -> Tensor:
    """Numbers of few bits, uint8 [blocks, n] -> [blocks, n * 8 / bits]: of so many bytes, the lowest bits first."""
    import torch

    if together % 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
        numbers: Tensor = (x.unflatten(1, (-1, 1, together)) >> shifts) & (1 << bits) - 1
        return numbers.flatten(1)
    # Not `contiguous`, which leaves the stride of a single block as it is.
    eight = x.clone(memory_format=torch.contiguous_format).view(torch.int64).unflatten(1, (-1, together // 8))
    planes = [eight >> shift & repeated((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(planes, 2).view(torch.uint8).flatten(1)


def _signed(x: Tensor, least: int = 0) -> Tensor:
    """Int8, numbers that are counted from `least` on."""
    import torch

    return (x + least % 256).view(torch.int8)


def _in_halves(steps: Tensor, minima: Tensor | None = None) -> Scales:
    """Scales, and minima, as they are, uint8 [blocks, 2] each."""
    return Scales(steps=_halves(steps), minima=None if minima is None else _halves(minima), storage=Storage.HALF)


def _of_units(
    steps: Tensor, units: Tensor, minima: Tensor | None = None, minimum_units: Tensor | None = None
) -> Scales:
    """Scales as int8 times their unit, uint8 [blocks, 2]; minima likewise, which files have with the other sign."""
    return Scales(
        steps=steps,
        units=_halves(units),
        minima=minima,
        minimum_units=None if minimum_units is None else -_halves(minimum_units),
        storage=Storage.BYTE,
        group=UNIT // steps.shape[1],
    )


def _q8_0(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(x[:, 2:].contiguous()), _in_halves(x[:, :2])


def _q4_0(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_planes(x[:, 2:], 4, 16), -8), _in_halves(x[:, :2])


def _q4_1(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_planes(x[:, 4:], 4, 16)), _in_halves(x[:, :2], x[:, 2:4])


def _q5(x: Tensor) -> Tensor:
    """The numbers from 0 to 31 of Q5_0 and Q5_1: the highest bits, one behind the other, come first."""
    import torch

    bits = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64).flatten()
    highest = bits[x[:, :4].int()].view(torch.uint8)
    return _planes(x[:, 4:], 4, 16) | highest << 4


def _q5_0(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_q5(x[:, 2:]), -16), _in_halves(x[:, :2])


def _q5_1(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_q5(x[:, 4:])), _in_halves(x[:, :2], x[:, 2:4])


def _q2_k(x: Tensor) -> tuple[Tensor, Scales]:
    scales = _signed(x[:, :16] & 15), x[:, 80:82], _signed(x[:, :16] >> 4), x[:, 82:84]
    return _signed(_planes(x[:, 16:80], 2, 32)), _of_units(*scales)


def _q3_k(x: Tensor) -> tuple[Tensor, Scales]:
    numbers = _planes(x[:, 32:96], 2, 32) | _planes(x[:, :32], 1, 32) << 2
    steps = _planes(x[:, 96:104], 4, 8) | _planes(x[:, 104:108], 2, 4) << 4
    return _signed(numbers, -4), _of_units(_signed(steps, -32), x[:, 108:110])


def _of_four_and_five(x: Tensor) -> Scales:
    """The scales of Q4_K and Q5_K: eight numbers of 6 bits for scales and minima each, in twelve bytes."""
    import torch

    low, high, both = x[:, 4:8], x[:, 8:12], x[:, 12:16]
    steps = torch.cat([low & 63, both & 15 | low >> 2 & 48], 1)
    minima = torch.cat([high & 63, both >> 4 | high >> 2 & 48], 1)
    return _of_units(_signed(steps), x[:, :2], _signed(minima), x[:, 2:4])


def _q4_k(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_planes(x[:, 16:], 4, 32)), _of_four_and_five(x)


def _q5_k(x: Tensor) -> tuple[Tensor, Scales]:
    return _signed(_planes(x[:, 48:], 4, 32) | _planes(x[:, 16:48], 1, 32) << 4), _of_four_and_five(x)


def _q6_k(x: Tensor) -> tuple[Tensor, Scales]:
    numbers = _planes(x[:, :128], 4, 64) | _planes(x[:, 128:192], 2, 32) << 4
    return _signed(numbers, -32), _of_units(_signed(x[:, 192:208].contiguous()), x[:, 208:])


def _levels(storage: Storage, codes: Tensor) -> Tensor:
    """Int8, what codes stand for; bytes are translated in a tenth of the time that an index takes."""
    import torch

    table = bytes(level % 256 for level in FORMATS[storage].levels).ljust(256)
    return torch.frombuffer(bytearray(codes.numpy().tobytes().translate(table)), dtype=torch.int8).view(codes.shape)


def _iq4_nl(x: Tensor) -> tuple[Tensor, Scales]:
    return _levels(Storage.LEVEL, _planes(x[:, 2:], 4, 16)), _in_halves(x[:, :2])


def _iq4_xs(x: Tensor) -> tuple[Tensor, Scales]:
    import torch

    low = ((x[:, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8)) & 15).flatten(1)
    high = ((x[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3).flatten(1)
    return _levels(Storage.LEVEL, _planes(x[:, 8:], 4, 16)), _of_units(_signed(low | high << 4, -32), x[:, :2])


def _mxfp4(x: Tensor, together: int = 16) -> tuple[Tensor, Scales]:
    """Scales are 2^(e - 128), as numbers are twice those of E2M1."""
    import torch

    exponents = x[:, :1].int()
    bits = torch.where(exponents < 2, 1 << 21 + exponents, (exponents - 1) << 23)  # the first two are subnormal
    steps = bits.view(torch.float32).bfloat16()
    return _levels(Storage.MICRO, _planes(x[:, 1:], 4, together)), Scales(steps=steps, storage=Storage.BFLOAT)


# As safetensors files have them: numbers that follow each other share a byte. The scale is put in front of a block.
MXFP4_IN_PAIRS = Kind("MXFP4", GROUP, 17, Storage.MICRO, partial(_mxfp4, together=1))
# By their numbers.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    30: Kind("BF16", 1, 2),
    8: Kind("Q8_0", GROUP, 34, Storage.BYTE, _q8_0),
    2: Kind("Q4_0", GROUP, 18, Storage.NIBBLE, _q4_0),
    3: Kind("Q4_1", GROUP, 20, Storage.NIBBLE, _q4_1),
    6: Kind("Q5_0", GROUP, 22, Storage.FIVE, _q5_0),
    7: Kind("Q5_1", GROUP, 24, Storage.FIVE, _q5_1),
    10: Kind("Q2_K", UNIT, 84, Storage.TWO, _q2_k),
    11: Kind("Q3_K", UNIT, 110, Storage.THREE, _q3_k),
    12: Kind("Q4_K", UNIT, 144, Storage.NIBBLE, _q4_k),
    13: Kind("Q5_K", UNIT, 176, Storage.FIVE, _q5_k),
    14: Kind("Q6_K", UNIT, 210, Storage.SIX, _q6_k),
    20: Kind("IQ4_NL", GROUP, 18, Storage.LEVEL, _iq4_nl),
    23: Kind("IQ4_XS", UNIT, 136, Storage.LEVEL, _iq4_xs),
    39: Kind("MXFP4", GROUP, 17, Storage.MICRO, _mxfp4),
}
# By their names.
NAMED = {kind.name: kind for kind in KINDS.values()}
