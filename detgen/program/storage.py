"""Number formats of weights, and how to read each, in plain PyTorch.

Weights are stored by detgen/kernels/c/arrange.c, and read by stored.h, pairs.h, cores.h and whole.h there, and by
linear.py, core_linear.py and whole_linear.py of detgen/kernels/triton/. setup.py reads this module, so torch is
imported only when needed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Storage(IntEnum):
    """Number formats of weights.

    Formats from BYTE on hold whole numbers in few bits, with a scale for each group. In CODE they stand for sixteen
    codes in floating point, and weights are widened to float32 when read, like those of formats before BYTE. The others
    are multiplied by whole inputs. In BYTE, NIBBLE, TWO, THREE, FIVE and SIX, named after their bits, the numbers are
    literal; in LEVEL (llama.cpp's IQ4) and MICRO (MXFP4) they select one of sixteen. PAIR is bf16, multiplied by inputs
    rounded to bf16; TC25 and TC24 are the same, but products are added up as tensor cores do.
    """

    FLOAT = 0
    BFLOAT = 1
    HALF = 2
    PAIR = 3
    TC25 = 4
    TC24 = 5
    BYTE = 6
    NIBBLE = 7
    CODE = 8
    TWO = 9
    THREE = 10
    FIVE = 11
    SIX = 12
    LEVEL = 13
    MICRO = 14

    @property
    def whole(self) -> bool:
        """Whether inputs are rounded to whole numbers, too."""
        return self >= Storage.BYTE and self != Storage.CODE

    @property
    def paired(self) -> bool:
        """Whether two inputs in bf16 stand together and inputs are rounded to bf16."""
        return Storage.PAIR <= self < Storage.BYTE

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded: to whole numbers, or to bf16."""
        return self.whole or self.paired


class Format(NamedTuple):
    """How a number format is stored.

    Attributes:
        dtype: name of the stored dtype in numpy and torch.
        bits: bits per weight.
        together: number of inputs whose weights of a column stand together.
        planes: of whole numbers, how many bits of each stand together: first the lowest ones of all, then the others.
        least: of whole numbers, the smallest allowed in weights without minima.
        levels: what each of sixteen numbers stands for; empty if they are literal.
        grouped: the possible numbers of scales of a group of inputs, and whether there are minima then.
    """

    dtype: str
    bits: int
    together: int = 1
    planes: tuple[int, ...] = ()
    least: int = 0
    levels: tuple[int, ...] = ()
    grouped: tuple[tuple[int, bool], ...] = ()


TOGETHER, PAIR = 4, 2  # inputs that processors multiply at once: whole numbers, and those in bf16
SMALLEST = 2.0**-55  # magnitude of a number in a pair: products are multiples of 2^-124, and no sum is subnormal
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # llama.cpp's kvalues_iq4nl
_MICRO = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of E2M1 (OCP Microscaling Formats 1.0, 5.3.3)


_Grouped = tuple[tuple[int, bool], ...]
_PLAIN: _Grouped = ((1, False),)
_PLAIN_OR_WITH_MINIMA: _Grouped = (*_PLAIN, (1, True))


def _in_few(*planes: int, grouped: _Grouped = _PLAIN, levels: tuple[int, ...] = (), least: int | None = None) -> Format:
    bits = sum(planes)
    return Format("uint8", bits, TOGETHER, planes, -(1 << bits - 1) if least is None else least, levels, grouped)


FORMATS = {
    Storage.FLOAT: Format("float32", 32),
    Storage.BFLOAT: Format("bfloat16", 16),
    Storage.HALF: Format("float16", 16),
    **{storage: Format("bfloat16", 16, PAIR) for storage in Storage if storage.paired},
    Storage.BYTE: _in_few(8),
    Storage.NIBBLE: _in_few(4, grouped=_PLAIN_OR_WITH_MINIMA),
    Storage.CODE: Format("uint8", 4, planes=(4,), least=-8, grouped=_PLAIN),
    Storage.TWO: _in_few(2, grouped=((2, True),)),
    Storage.THREE: _in_few(2, 1, grouped=((2, False),)),
    Storage.FIVE: _in_few(4, 1, grouped=_PLAIN_OR_WITH_MINIMA),
    Storage.SIX: _in_few(4, 2, grouped=((2, False),)),
    Storage.LEVEL: _in_few(4, levels=_LEVELS, least=-128),
    Storage.MICRO: _in_few(4, levels=_MICRO + tuple(-x for x in _MICRO), least=-_MICRO[-1]),
}


class Rule(NamedTuple):
    """How tensor cores add up products of bf16: see `tensor_cores`.

    Attributes:
        bits: number of bits kept below the largest exponent.
        inputs: number of inputs whose products are added at a time.
    """

    bits: int
    inputs: int


RULES = {Storage.TC25: Rule(25, 16), Storage.TC24: Rule(24, 8)}


def bf16(x: Tensor) -> Tensor:
    """Round to bf16, ties to even; results below SMALLEST in magnitude become 0."""
    found = x.bfloat16()
    return found.masked_fill(found.abs() < SMALLEST, 0.0)


def unpack(storage: Storage, data: Tensor, least: int = 0) -> Tensor:
    """Return weights, [..., inputs, PANEL], as before storing: bf16 numbers, or whole numbers in int8."""
    made = FORMATS[storage]
    codes = data if storage.paired else _of_planes(made, data)
    codes = codes.unflatten(-1, (-1, made.together)).transpose(-1, -2).flatten(-3, -2)
    return codes if storage.paired else _whole(made, codes, least)


def _whole(made: Format, codes: Tensor, least: int) -> Tensor:
    import torch

    if made.levels:
        return torch.tensor(made.levels, dtype=torch.int8, device=codes.device)[codes.int()]
    return (codes + least % 256).view(torch.int8)


def repeated(byte: int) -> int:
    """Return the int64 whose bytes all equal the given one."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def _of_planes(made: Format, data: Tensor) -> Tensor:
    import torch

    codes, first = torch.zeros((), dtype=torch.uint8, device=data.device), 0
    widths = [data.shape[-1] * bits // made.bits for bits in made.planes]
    for bits, plane in zip(made.planes, data.split(widths, -1), strict=True):
        parts = [plane >> bits * at & (1 << bits) - 1 for at in range(8 // bits)]
        codes = codes | torch.cat(parts, -1) << first
        first += bits
    return codes


def numbers(whole: Tensor, codes: Tensor | None) -> Tensor:
    """Return in float32 what whole numbers are or stand for; `codes`, [16], are those of -8 to 7."""
    return whole.float() if codes is None else codes[whole.int() + 8]
