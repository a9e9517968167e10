"""Random weights in few bits, of every kind, by which back ends are compared."""

from __future__ import annotations

import torch

from detgen.kernels.c.quantizing import Quantized
from detgen.program.arrays import array, each
from detgen.program.operands import GROUP, UNIT, Scales
from detgen.program.storage import FORMATS, Storage

InFewBits = tuple[Storage, Storage, int, bool]
IN_FEW_BITS: list[InFewBits] = [  # storage, that of the scales, inputs that share one, minima
    *((storage, Storage.FLOAT, GROUP, False) for storage in (Storage.CODE, Storage.BYTE, Storage.NIBBLE)),
    *((storage, Storage.HALF, GROUP, False) for storage in (Storage.BYTE, Storage.NIBBLE, Storage.FIVE, Storage.LEVEL)),
    *((Storage.MICRO, Storage.BFLOAT, GROUP, False), (Storage.LEVEL, Storage.BYTE, GROUP, False)),
    *((storage, Storage.HALF, GROUP, True) for storage in (Storage.NIBBLE, Storage.FIVE)),
    *((storage, Storage.BYTE, GROUP, True) for storage in (Storage.NIBBLE, Storage.FIVE)),
    *((storage, Storage.BYTE, GROUP // 2, False) for storage in (Storage.THREE, Storage.SIX)),
    (Storage.TWO, Storage.BYTE, GROUP // 2, True),
]


def in_few_bits(
    seed: int, outputs: int, inputs: int, storage: Storage, scaled: Storage, group: int, minima: bool
) -> Quantized:
    """Draw weights of whole numbers in the range of `storage`, and their scales, from a seed.

    Args:
        seed: seed of the generator.
        outputs: rows of the weight.
        inputs: columns of the weight, a multiple of `group`, or of UNIT where scales are in int8.
        storage: number format of the whole numbers.
        scaled: number format of the scales.
        group: number of inputs that share a scale.
        minima: whether there are minima, too.
    """
    made, random = FORMATS[storage], torch.Generator().manual_seed(seed)
    dtype = {Storage.FLOAT: torch.float, Storage.HALF: torch.half, Storage.BFLOAT: torch.bfloat16}.get(scaled)

    def drawn(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most + 1, shape, generator=random).to(torch.int8)

    def steps_of(n: int) -> torch.Tensor:
        shape = outputs, inputs // n
        return drawn(-128, 127, *shape) if dtype is None else torch.randn(shape, generator=random).to(dtype)

    units = [torch.randn(outputs, inputs // UNIT, generator=random).half() if dtype is None else None for _ in range(2)]
    least = 0 if minima else made.least
    whole = drawn(least, least + (1 << made.bits) - 1, outputs, inputs)
    if made.levels:
        whole = torch.tensor(made.levels, dtype=torch.int8)[drawn(0, 15, outputs, inputs).int()]
    scales = Scales(
        steps=steps_of(group),
        units=units[0],
        minima=steps_of(group) if minima else None,
        minimum_units=units[1] if minima else None,
        storage=scaled,
        group=group,
    )
    codes = array(torch.randn(16, generator=random)) if storage == Storage.CODE else None
    return Quantized(array(whole), each(scales, array), storage, codes)
