"""Products of bf16 on tensor cores: checks bit by bit that the device follows the rule that emulates them.

The rule is in `detgen/program/tensor_cores.py`. Hopper and Blackwell take 16 inputs and 25 bits (`tc25`), Ampere and
Ada 8 inputs and 24 bits (`tc24`).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.triton.core_linear import rule_of
from detgen.kernels.triton.launching import OPTIONS
from detgen.program.storage import RULES, Storage
from detgen.program.tensor_cores import added
from gpu.notebook import Asked, Notebook

_INPUTS = (16, 128, 512)
_ROWS = (16, 64)  # processors have different instructions for these


@triton.jit
def _product(a, b, start, to, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row, column, depth = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    sums = tl.load(start + row * COLUMNS + column)
    for first in range(0, inputs, DEPTH):
        some = tl.load(a + row * inputs + first + depth[None, :])
        sums = tl.dot(some, tl.load(b + (first + depth[:, None]) * COLUMNS + column), sums)
    tl.store(to + row * COLUMNS + column, sums)


def product(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return [m, k] times [k, n] plus float32 [m, n] as float32 [m, n]; tensor cores multiply bf16."""
    to = torch.empty_like(start)
    _product[(1,)](a, b, start, to, a.shape[1], *start.shape, 16, **OPTIONS)
    return to


def cases(inputs: int, rows: int, columns: int = 32) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return products by name: factors a and b and summand, as bf16 [m, k], bf16 [k, n] and float32 [m, n]."""
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
        "that are too large": (a * 2.0**64, b * 2.0**62, start),
    }
    return {name: (a.bfloat16(), b.bfloat16(), start) for name, (a, b, start) in found.items()}


def measure(book: Notebook, asked: Asked) -> None:
    """Compare the device with the rule; Triton's interpreter, which rounds elsewhere, only comes near it."""
    rule = Storage.TC25 if asked.tiny else rule_of(asked.device)
    name = rule.name.lower()
    book.note("rule", name, f"the rule of this device is {name}")
    for inputs in _INPUTS[: 1 if asked.tiny else None]:
        for rows in _ROWS[: 1 if asked.tiny else None]:
            for kind, given in cases(inputs, rows).items():
                name = f"products {kind}, {rows} rows, {inputs} inputs"
                with book.part(name):
                    if not asked.tiny:
                        _compare(book, asked, name, given, rule)
                    elif kind == "random":
                        near = product(*(x.float() for x in given)).numpy()  # the interpreter multiplies bits of bf16
                        assert np.allclose(near, added(*(x.float() for x in given), RULES[rule]), 1e-4, 1e-4)
                        book.note(name, {"near": True}, f"{name}: near the rule's numbers")


def _compare(
    book: Notebook, asked: Asked, name: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rule: Storage
) -> None:
    wanted = added(*(x.float() for x in given), RULES[rule]).numpy()
    found = product(*(x.to(asked.device) for x in given)).cpu().numpy()
    different = int((found.view(np.int32) != wanted.view(np.int32)).sum())
    book.compared(name, different, found.size, "the rule's bits")
