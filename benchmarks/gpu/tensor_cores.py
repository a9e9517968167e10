"""Products of bf16 on tensor cores: whether the device follows the rule that emulates them, bit by bit.

The rule is that of MMA-Sim (github.com/microsoft/MMA-Sim). For some inputs at a time, the exact products and the
number that they are added to are cut, toward zero, at so many bits below the largest exponent among them, that of a
product being the sum of those of its factors; they are added exactly, and the sum is cut to float32. Hopper and
Blackwell take 16 inputs and 25 bits (`tc25`), Ampere and Ada 8 inputs and 24 bits (`tc24`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS
from gpu.notebook import Asked, Notebook

_LEAST = -126  # the exponent of zeros, and of what is subnormal
_INPUTS = (16, 128, 512)
_ROWS = (16, 64)  # of which processors have other instructions


class Rule(NamedTuple):
    """How tensor cores add up products.

    Attributes:
        name: of the rule.
        bits: that are kept below the largest exponent.
        inputs: whose products are added at a time.
    """

    name: str
    bits: int
    inputs: int


HOPPER, AMPERE = Rule("tc25", 25, 16), Rule("tc24", 24, 8)


def rule_of(capability: tuple[int, int]) -> Rule:
    """That of a compute capability."""
    return HOPPER if capability >= (9, 0) else AMPERE


def emulated(a: np.ndarray, b: np.ndarray, start: np.ndarray, rule: Rule) -> np.ndarray:
    """What tensor cores make of a product.

    Args:
        a: float64 [m, k], finite numbers of bf16.
        b: float64 [k, n], likewise.
        start: float64 [m, n], finite numbers of float32, to which the products are added.
        rule: how.

    Returns:
        float32 [m, n].
    """
    sums, of_a, of_b = start, _exponents(a), _exponents(b)
    for first in range(0, a.shape[1], rule.inputs):
        some = slice(first, first + rule.inputs)
        products = a[:, some, None] * b[None, some]  # exact, as sums of fewer than 2^20 of what is cut are
        largest = np.maximum((of_a[:, some, None] + of_b[None, some]).max(1), _exponents(sums))
        cut = np.trunc(np.ldexp(products, rule.bits - largest[:, None])).sum(1)
        cut += np.trunc(np.ldexp(sums, rule.bits - largest))
        sums = _narrowed(np.ldexp(cut, largest - rule.bits)).astype(np.float64)
    return sums.astype(np.float32)


def _exponents(x: np.ndarray) -> np.ndarray:
    """Of numbers 1.f * 2^e; those of zeros and of what is subnormal are the least."""
    return np.where(x == 0, _LEAST, np.maximum(np.frexp(x)[1] - 1, _LEAST))


def _narrowed(x: np.ndarray) -> np.ndarray:
    """float64 to float32, toward zero."""
    near = x.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)


@triton.jit
def _product(a, b, start, to, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row, column, depth = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    sums = tl.load(start + row * COLUMNS + column)
    for first in range(0, inputs, DEPTH):
        some = tl.load(a + row * inputs + first + depth[None, :])
        sums = tl.dot(some, tl.load(b + (first + depth[:, None]) * COLUMNS + column), sums)
    tl.store(to + row * COLUMNS + column, sums)


def product(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[m, k] times [k, n] plus float32 [m, n]: float32 [m, n]; of bf16 by tensor cores."""
    to = torch.empty_like(start)
    _product[(1,)](a, b, start, to, a.shape[1], *start.shape, 16, **OPTIONS)
    return to


def cases(inputs: int, rows: int, columns: int = 32) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What is multiplied, by name: a, b, and what is added to; bf16 [m, k], bf16 [k, n] and float32 [m, n]."""
    maker = torch.Generator().manual_seed(inputs + rows)

    def drawn(*size: int, spread: float = 0.0) -> torch.Tensor:
        numbers = torch.randn(*size, generator=maker)
        return numbers * torch.exp2((torch.rand(*size, generator=maker) * 2 - 1) * spread)

    a, b, start = drawn(rows, inputs), drawn(inputs, columns), drawn(rows, columns)
    zeros, large = a.clone(), b.clone()
    zeros[:], large[3] = 0, 2.0**59
    opposed, facing = a.clone(), b.clone()
    opposed[:, 1::2], facing[1::2] = -a[:, ::2], b[::2]
    wide = drawn(rows, inputs, spread=40), drawn(inputs, columns, spread=40), drawn(rows, columns, spread=40)
    hardly = drawn(rows, inputs) * 2.0**-64, drawn(inputs, columns) * 2.0**-68, drawn(rows, columns) * 2.0**-130
    found = {
        "random": (a, b, start),
        "of many magnitudes": wide,
        "that cancel": (opposed, facing, start * 2.0**-20),
        "that are subnormal": hardly,
        "of 0 and 2^59": (zeros, large, start * 2.0**-90),
    }
    return {name: (a.bfloat16(), b.bfloat16(), start) for name, (a, b, start) in found.items()}


def measure(book: Notebook, asked: Asked) -> None:
    """Compare the device with the rule; Triton's interpreter, which rounds elsewhere, comes near it."""
    rule = HOPPER if asked.tiny else rule_of(torch.cuda.get_device_capability())
    book.note("rule", rule.name, f"the rule of this device is {rule.name}")
    for inputs in _INPUTS[: 1 if asked.tiny else None]:
        for rows in _ROWS[: 1 if asked.tiny else None]:
            for kind, given in cases(inputs, rows).items():
                name = f"products {kind}, {rows} rows, {inputs} inputs"
                with book.part(name):
                    if not asked.tiny:
                        _compare(book, asked, name, given, rule)
                    elif kind == "random":
                        near = product(*(x.float() for x in given)).numpy()  # the interpreter multiplies bits of bf16
                        assert np.allclose(near, emulated(*(x.double().numpy() for x in given), rule), 1e-4, 1e-4)
                        book.note(name, {"near": True}, f"{name}: near the rule's numbers")


def _compare(
    book: Notebook, asked: Asked, name: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rule: Rule
) -> None:
    wanted = emulated(*(x.double().numpy() for x in given), rule)
    found = product(*(x.to(asked.device) for x in given)).cpu().numpy()
    different = int((found.view(np.int32) != wanted.view(np.int32)).sum())
    said = f"OTHER BITS, {different} of {found.size} numbers" if different else "the rule's bits"
    book.note(name, {"equal": not different, "different": different}, f"{name}: {said}")
    assert not different, said
