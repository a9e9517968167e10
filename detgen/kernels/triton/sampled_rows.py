"""What the kernels of choosing know of a row: its parameters, its largest logit, and where its logits are."""

from __future__ import annotations

import triton
import triton.language as tl

SECTION = 4096  # entries of a row that a program takes

TEMPERATURE: tl.constexpr = tl.constexpr(0)  # rows of the table of parameters
TOP_P: tl.constexpr = tl.constexpr(1)
FLOOR: tl.constexpr = tl.constexpr(2)
TOP_K: tl.constexpr = tl.constexpr(3)
SEED: tl.constexpr = tl.constexpr(4)
SAMPLE: tl.constexpr = tl.constexpr(5)
POSITION: tl.constexpr = tl.constexpr(6)
INVERSE: tl.constexpr = tl.constexpr(7)


@triton.jit
def peak_of(best, row, sections, SECTIONS: tl.constexpr):
    """The largest of a row's logits, as they are adjusted."""
    at = tl.arange(0, SECTIONS)
    return tl.max(tl.load(best + row * sections + at, mask=at < sections, other=float("-inf")), 0)


@triton.jit
def parameter(table, rows, row, WHICH: tl.constexpr):
    """One float64 of a row's parameters."""
    return tl.load(table + WHICH * rows + row).to(tl.float64, bitcast=True)


@triton.jit
def sampled(table, rows, row, peak):
    """Whether a row is sampled: it has a temperature, and its largest logit is finite."""
    warm = parameter(table, rows, row, TEMPERATURE) > 0
    return warm & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def source_of(logits, copies, starts, row, stride, vocabulary, ADJUSTS: tl.constexpr):
    """Where a row's logits are, as they are adjusted."""
    source = logits + row * stride
    if ADJUSTS:  # noqa: SIM102 (known when this is compiled, as the other is not)
        if tl.load(starts + row) < tl.load(starts + row + 1):
            source = copies + row * vocabulary
    return source
