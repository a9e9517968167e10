"""Types of tensors in GGUF files: their blocks, and the weights in them, equal to those of the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from detgen.program.arrays import BFLOAT16
from detgen.program.operands import GROUP, UNIT, Scales
from detgen.program.storage import FORMATS, Storage, repeated

if TYPE_CHECKING:
    from detgen.kernels.c.quantizing import Quantized

_AT_A_TIME = 1 << 22  # entries to convert at a time


class Kind(NamedTuple):
    """A type of tensors.

    Attributes:
        name: llama.cpp's name.
        entries: number of entries of a block.
        size: bytes of a block.
        storage: storage of whole numbers; None for floats.
        weights: converts blocks, uint8 [blocks, size], to whole numbers, int8 [blocks, entries], and their scales,
            [blocks, groups].
    """

    name: str
    entries: int
    size: int
    storage: Storage | None = None
    weights: Callable[[np.ndarray], tuple[np.ndarray, Scales]] | None = None

    def read(self, blocks: np.ndarray) -> Quantized:
        """Return the weights in blocks of whole numbers, uint8 [blocks, size], as [blocks, entries].

        Raises:
            ValueError: if a scale is not finite.
        """
        from detgen.kernels.c.quantizing import Quantized

        assert self.weights is not None
        assert self.storage is not None
        whole = np.empty((len(blocks), self.entries), np.int8)
        scales, step = None, _AT_A_TIME // self.entries
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            whole[part], some = self.weights(blocks[part])
            scales = scales or some.each(lambda x: np.empty((len(blocks), *x.shape[1:]), x.dtype))
            scales.each(lambda to, x, part=part: np.copyto(to[part], x), some)
        assert scales is not None
        with np.errstate(all="ignore"):
            finite = all(np.isfinite(found).all() for found in scales.floats() if found is not None)
        if not finite:
            raise ValueError("a scale is infinite or not a number")
        return Quantized(whole, scales, self.storage)


def _halves(x: np.ndarray) -> np.ndarray:
    """Return float16 numbers, uint8 [blocks, 2 n] -> [blocks, n]."""
    return np.ascontiguousarray(x).view(np.float16)


def _planes(x: np.ndarray, bits: int, together: int) -> np.ndarray:
    """Return numbers of few bits, uint8 [blocks, n] -> [blocks, n * 8 / bits]; per `together` bytes, low bits first."""
    if together % 8:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        numbers = (x.reshape(len(x), -1, 1, together) >> shifts) & np.uint8((1 << bits) - 1)
        return numbers.reshape(len(x), -1)
    eight = np.ascontiguousarray(x).view(np.int64).reshape(len(x), -1, together // 8)
    planes = [eight >> shift & repeated((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(planes, 2).view(np.uint8).reshape(len(x), -1)


def _signed(x: np.ndarray, least: int = 0) -> np.ndarray:
    """Return numbers counted from `least` on as int8."""
    return (x + np.uint8(least % 256)).view(np.int8)


def _in_halves(steps: np.ndarray, minima: np.ndarray | None = None) -> Scales:
    """Return scales, and minima, that are float16, uint8 [blocks, 2] each."""
    return Scales(steps=_halves(steps), minima=None if minima is None else _halves(minima), storage=Storage.HALF)


def _of_units(
    steps: np.ndarray, units: np.ndarray, minima: np.ndarray | None = None, minimum_units: np.ndarray | None = None
) -> Scales:
    """Return scales as int8 times their unit, uint8 [blocks, 2]; minima likewise, which files store negated."""
    return Scales(
        steps=steps,
        units=_halves(units),
        minima=minima,
        minimum_units=None if minimum_units is None else -_halves(minimum_units),
        storage=Storage.BYTE,
        group=UNIT // steps.shape[1],
    )


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(np.ascontiguousarray(x[:, 2:])), _in_halves(x[:, :2])


def _q4_0(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_planes(x[:, 2:], 4, 16), -8), _in_halves(x[:, :2])


def _q4_1(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_planes(x[:, 4:], 4, 16)), _in_halves(x[:, :2], x[:, 2:4])


def _q5(x: np.ndarray) -> np.ndarray:
    """Return the numbers from 0 to 31 of Q5_0 and Q5_1; their highest bits come first, packed together."""
    bits = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.uint8).view(np.int64).ravel()
    highest = bits[x[:, :4]].view(np.uint8)
    found: np.ndarray = _planes(x[:, 4:], 4, 16) | highest << 4
    return found


def _q5_0(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_q5(x[:, 2:]), -16), _in_halves(x[:, :2])


def _q5_1(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_q5(x[:, 4:])), _in_halves(x[:, :2], x[:, 2:4])


def _q2_k(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    scales = _signed(x[:, :16] & 15), x[:, 80:82], _signed(x[:, :16] >> 4), x[:, 82:84]
    return _signed(_planes(x[:, 16:80], 2, 32)), _of_units(*scales)


def _q3_k(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    numbers = _planes(x[:, 32:96], 2, 32) | _planes(x[:, :32], 1, 32) << 2
    steps = _planes(x[:, 96:104], 4, 8) | _planes(x[:, 104:108], 2, 4) << 4
    return _signed(numbers, -4), _of_units(_signed(steps, -32), x[:, 108:110])


def _of_four_and_five(x: np.ndarray) -> Scales:
    """Return the scales of Q4_K and Q5_K: eight numbers of 6 bits each for scales and for minima, in twelve bytes."""
    low, high, both = x[:, 4:8], x[:, 8:12], x[:, 12:16]
    steps = np.concatenate([low & 63, both & 15 | low >> 2 & 48], 1)
    minima = np.concatenate([high & 63, both >> 4 | high >> 2 & 48], 1)
    return _of_units(_signed(steps), x[:, :2], _signed(minima), x[:, 2:4])


def _q4_k(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_planes(x[:, 16:], 4, 32)), _of_four_and_five(x)


def _q5_k(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _signed(_planes(x[:, 48:], 4, 32) | _planes(x[:, 16:48], 1, 32) << 4), _of_four_and_five(x)


def _q6_k(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    numbers = _planes(x[:, :128], 4, 64) | _planes(x[:, 128:192], 2, 32) << 4
    return _signed(numbers, -32), _of_units(_signed(np.ascontiguousarray(x[:, 192:208])), x[:, 208:])


def _levels(storage: Storage, codes: np.ndarray) -> np.ndarray:
    """Return the levels of codes as int8; translating bytes takes a tenth of the time of indexing."""
    table = bytes(level % 256 for level in FORMATS[storage].levels).ljust(256)
    return np.frombuffer(codes.tobytes().translate(table), np.int8).reshape(codes.shape)


def _iq4_nl(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    return _levels(Storage.LEVEL, _planes(x[:, 2:], 4, 16)), _in_halves(x[:, :2])


def _iq4_xs(x: np.ndarray) -> tuple[np.ndarray, Scales]:
    low = ((x[:, 4:8, None] >> np.array([0, 4], np.uint8)) & 15).reshape(len(x), -1)
    high = ((x[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3).reshape(len(x), -1)
    return _levels(Storage.LEVEL, _planes(x[:, 8:], 4, 16)), _of_units(_signed(low | high << 4, -32), x[:, :2])


def _mxfp4(x: np.ndarray, together: int = 16) -> tuple[np.ndarray, Scales]:
    """Convert MXFP4. Scales are 2^(e - 128), since numbers are twice those of E2M1; an exponent of 255 is NaN."""
    exponents = x[:, :1].astype(np.int32)
    bits = np.where(exponents < 2, 1 << 21 + exponents % 2, (exponents - 1) << 23)  # the first two are subnormal
    steps = np.where(exponents == 255, np.float32(np.nan), bits.astype(np.int32).view(np.float32)).astype(BFLOAT16)
    return _levels(Storage.MICRO, _planes(x[:, 1:], 4, together)), Scales(steps=steps, storage=Storage.BFLOAT)


# As in safetensors files: adjacent numbers share a byte. The scale is put in front of its block.
MXFP4_IN_PAIRS = Kind("MXFP4", GROUP, 17, Storage.MICRO, partial(_mxfp4, together=1))
# By llama.cpp's numbers.
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
# By name.
NAMED = {kind.name: kind for kind in KINDS.values()}
