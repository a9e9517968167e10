"""Columns of a linear layer: their places in panels, and the last operations on their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import activated, capped, put, sigmoid
from detgen.program.operands import PANEL

_PANEL = tl.constexpr(PANEL)


@triton.jit
def places(output, GATED: tl.constexpr):
    """Return the panels (int64) of some outputs, and their columns there; of a gated layer, those of their gates."""
    if GATED:
        panel, column = output // (_PANEL // 2), output % (_PANEL // 2)
    else:
        panel, column = output // _PANEL, output % _PANEL
    return panel.to(tl.int64), column


@triton.jit
def of_one_weight(
    items,
    outputs,
    panels,
    routes,
    GATED: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the place of a tile with a single weight: with experts, the tile holds one route, and no other rows.

    Heads are the last axis of the grid. Returns its items (int64), which of them exist, the row of inputs that each
    reads; its outputs, which of them exist, [1, COLUMNS], their panels (int64) and columns.
    """
    row = tl.arange(0, ROWS)
    item = tl.program_id(0).to(tl.int64) * (1 if PICKS else ROWS) + row
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item_there, there = item < items, (output < outputs)[None, :]
    panel, column = places(output, GATED)
    read = item // PICKS if SHARED else item
    if HEADS > 1:
        panel += tl.program_id(2) * panels
        read = read * HEADS + tl.program_id(2)
    if PICKS:
        item_there = item_there & (row == 0)
        panel += tl.load(routes + 2 * tl.program_id(0).to(tl.int64)).to(tl.int64) * panels
    return item, item_there, read, output, there, panel[None, :], column[None, :]


@triton.jit
def behind(sums, x, first):
    """Add the next part to sums; the first stays as it is, even if it is -0."""
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
    """Store the results of `steps.Linear`, given the sums of a tile, [ROWS, COLUMNS].

    `opened` are the sums that gates multiply; `bias` and `to` point to entries of these, for columns that are `there`
    and entries `inside`.
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
