"""Columns of a linear layer: where they stand in panels, and what becomes of their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import activated, capped, put, sigmoid
from detgen.program.operands import PANEL

_PANEL = tl.constexpr(PANEL)


@triton.jit
def places(output, GATED: tl.constexpr):
    """The panels (int64) of some outputs, and their columns there; of a gated layer, those of their gates."""
    if GATED:
        panel, column = output // (_PANEL // 2), output % (_PANEL // 2)
    else:
        panel, column = output // _PANEL, output % _PANEL
    return panel.to(tl.int64), column


@triton.jit
def behind(sums, x, first):
    """The sum with what stands behind; the first stays as it is, if it is -0, too."""
    return tl.where(first, x, sums + x)


@triton.jit
def ended(
    sums,
    opened,
    bias,
    there,
    to,
    inside,
    factor,
    cap,
    limit,
    slope,
    shift,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Stores what `steps.Linear` makes of the sums of a tile, [ROWS, COLUMNS].

    `opened` are those that gates open; `bias` and `to` are where entries of these are, of columns that are `there` and
    of entries `inside`.
    """
    if BIASED:
        sums += tl.load(bias, mask=there, other=0.0)
    if LIMITED:
        sums = tl.where(sums > limit, limit, sums)
        sums = sums * sigmoid(sums * slope)
    else:
        sums = activated(sums, ACTIVATION)
    if GATED:
        if BIASED:
            opened += tl.load(bias + _PANEL // 2, mask=there, other=0.0)
        if LIMITED:
            opened = tl.where(opened > limit, limit, tl.where(opened < limit * -1.0, limit * -1.0, opened)) + shift
        sums = sums * opened
    if CAPPED:
        if SCALES:
            sums = sums * factor
        tl.store(to, capped(sums, cap), mask=inside)
    else:
        put(to, sums, inside, factor, ADDS, SCALES)
