"""Types of tensors of GGUF files: their blocks, and the weights in them.

A file's header is read by this, too, so torch is imported when weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from detgen.program.operands import Scales
from detgen.program.storage import Storage

if TYPE_CHECKING:
    from torch import Tensor

    from detgen.kernels.c.quantizing import Quantized

_WIDENED_AT_A_TIME = 1 << 22  # entries


class Kind(NamedTuple):
    """A type.

    Attributes:
        name: llama.cpp's.
        entries: of a block.
        size: bytes of a block.
        weights: makes blocks, uint8 [blocks, size], weights, [blocks, entries]; None of numbers as they are.
    """

    name: str
    entries: int
    size: int
    weights: Callable[[Tensor], Tensor | Quantized] | None = None


def _q8_0(blocks: Tensor) -> Quantized:
    import torch

    return _few(blocks[:, 2:].contiguous().view(torch.int8), blocks[:, :2], Storage.BYTE)


def _q4_0(blocks: Tensor) -> Quantized:
    """Of 32 weights, the first half is in the lower halves of the bytes."""
    import torch

    whole = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], dim=1).to(torch.int8) - 8
    return _few(whole, blocks[:, :2], Storage.NIBBLE)


def _few(whole: Tensor, scales: Tensor, storage: Storage) -> Quantized:
    """Whole numbers, [blocks, entries], with a scale a block in float16, uint8 [blocks, 2]."""
    import torch

    from detgen.kernels.c.quantizing import Quantized

    steps = scales.contiguous().view(torch.float16)
    return Quantized(whole, Scales(steps=steps, storage=Storage.HALF), storage)


def _q6_k(blocks: Tensor) -> Tensor:
    """Numbers in float32: a scale in float16 times two whole numbers of 8 and 6 bits is exact."""
    import torch
    from gguf import GGMLQuantizationType, dequantize

    made = torch.empty(len(blocks), 256)
    step = _WIDENED_AT_A_TIME // made.shape[1]
    for first in range(0, len(blocks), step):
        part = dequantize(blocks[first : first + step].numpy(), GGMLQuantizationType.Q6_K)
        made[first : first + step] = torch.from_numpy(part)
    return made


# By their numbers.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    30: Kind("BF16", 1, 2),
    8: Kind("Q8_0", 32, 34, _q8_0),
    2: Kind("Q4_0", 32, 18, _q4_0),
    14: Kind("Q6_K", 256, 210, _q6_k),
}
# By their names.
NAMED = {kind.name: kind for kind in KINDS.values()}
