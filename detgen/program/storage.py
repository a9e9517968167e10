"""Number formats of weights: how each is packed, and read again, in plain PyTorch.

Back ends read what is packed here: detgen/kernels/c/stored.h, pairs.h and whole.h, detgen/kernels/triton/linear.py and
whole_linear.py. setup.py reads this module, so torch is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Storage(IntEnum):
    """Number formats of weights.

    Those from BYTE on have whole numbers in few bits and a scale for each group of them: of BYTE from -128 to 127, of
    NIBBLE from -8 to 7. Of CODE, they are those of NIBBLE, and stand for sixteen codes. BYTE and NIBBLE are multiplied
    by whole numbers, PAIR by inputs that are rounded to bf16; the others are widened to float32 when they are read.
    """

    FLOAT = 0
    BFLOAT = 1
    HALF = 2
    PAIR = 3
    BYTE = 4
    NIBBLE = 5
    CODE = 6

    @property
    def whole(self) -> bool:
        """Whether inputs become whole numbers, too."""
        return self in (Storage.BYTE, Storage.NIBBLE)

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded: to whole numbers, or to bf16."""
        return self.whole or self is Storage.PAIR


def _as_it_is(numbers: Tensor) -> Tensor:
    return numbers


class Format(NamedTuple):
    """How a number format is stored.

    Attributes:
        dtype: of what is stored, as torch calls it.
        bits: that a weight takes.
        coded: whether whole numbers stand for codes.
        together: inputs whose weights of a column stand together.
        pack: makes whole numbers, int8 [..., inputs, PANEL], what is stored of them, [..., inputs / together, others];
            of PAIR the numbers themselves.
        unpack: makes them of that again.
    """

    dtype: str
    bits: int
    coded: bool = False
    together: int = 1
    pack: Callable[[Tensor], Tensor] = _as_it_is
    unpack: Callable[[Tensor], Tensor] = _as_it_is


def _in_halves(whole: Tensor) -> Tensor:
    """From -8 to 7, plus 8 in half a byte: the first half of the columns below, the other one above."""
    import torch

    low, high = (whole + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def _of_halves(data: Tensor) -> Tensor:
    import torch

    return torch.cat([data & 15, data >> 4], -1).to(torch.int8) - 8


_TOGETHER, _PAIR = 4, 2  # inputs that processors multiply at once: whole numbers, and those in bf16
SMALLEST = 2.0**-55  # magnitude of a number in a pair: products are multiples of 2^-124, and no sum is subnormal


def _in_fours(whole: Tensor, together: int = _TOGETHER) -> Tensor:
    """[..., inputs, PANEL] -> [..., inputs / 4, 4 * PANEL]: four inputs of a column, then the next column."""
    fours: Tensor = whole.unflatten(-2, (-1, together)).transpose(-1, -2).flatten(-2)
    return fours


def _of_fours(data: Tensor, together: int = _TOGETHER) -> Tensor:
    inputs: Tensor = data.unflatten(-1, (-1, together)).transpose(-1, -2).flatten(-3, -2)
    return inputs


def bf16(x: Tensor) -> Tensor:
    """The nearest numbers of bf16, of ties the even one; 0 for those that are below SMALLEST in magnitude then."""
    found = x.bfloat16()
    return found.masked_fill(found.abs() < SMALLEST, 0.0)


def _in_pairs(numbers: Tensor) -> Tensor:
    """As `_in_fours` two inputs of a column."""
    return _in_fours(bf16(numbers), _PAIR)


def _bytes_in_fours(whole: Tensor) -> Tensor:
    """From -128 to 127, plus 128."""
    import torch

    return _in_fours(whole).view(torch.uint8) ^ 128


def _bytes_of_fours(data: Tensor) -> Tensor:
    import torch

    return _of_fours((data ^ 128).view(torch.int8))


FORMATS = {
    Storage.FLOAT: Format("float32", 32),
    Storage.BFLOAT: Format("bfloat16", 16),
    Storage.HALF: Format("float16", 16),
    Storage.PAIR: Format("bfloat16", 16, together=_PAIR, pack=_in_pairs, unpack=lambda data: _of_fours(data, _PAIR)),
    Storage.BYTE: Format("uint8", 8, together=_TOGETHER, pack=_bytes_in_fours, unpack=_bytes_of_fours),
    Storage.NIBBLE: Format(
        "uint8",
        4,
        together=_TOGETHER,
        pack=lambda whole: _in_halves(_in_fours(whole)),
        unpack=lambda data: _of_fours(_of_halves(data)),
    ),
    Storage.CODE: Format("uint8", 4, coded=True, pack=_in_halves, unpack=_of_halves),
}


def numbers(whole: Tensor, codes: Tensor | None) -> Tensor:
    """float32, what whole numbers are, or stand for: codes, [16], those of -8 to 7."""
    return whole.float() if codes is None else codes[whole.int() + 8]
