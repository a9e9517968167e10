"""Linear layers with weights in panels, in any storage format.

Promise: an entry of the result is a chain of fused multiply-adds over the inputs, first to last, in parts of
PART_INPUTS; the sums of parts are added in order within a section of SECTION_PARTS, and those of sections in order, as
docs/numerics.md defines. A tile holds some rows and columns, which has no influence. For PAIR, inputs are `narrowed`,
once for all columns, and the odd one of two comes first. Weights multiplied by whole numbers: see `whole_linear`; by
tensor cores: `core_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton import core_linear
from detgen.kernels.triton.float_functions import nearest_bf16, part_of
from detgen.kernels.triton.launching import OPTIONS, tile, tiles
from detgen.kernels.triton.linear_columns import behind, ended, places
from detgen.kernels.triton.whole_linear import LEAST_SIDE, rounded, stored, whole_linear
from detgen.program.operands import GROUP, PANEL, PART_INPUTS, SECTION_PARTS, Activation, Weight
from detgen.program.storage import RULES, SMALLEST, Storage

_SMALLEST = tl.constexpr(SMALLEST)
_ENTRIES = 1024  # most entries of a tile
_PANEL = tl.constexpr(PANEL)
_PART = tl.constexpr(PART_INPUTS)
_SECTION = tl.constexpr(SECTION_PARTS * PART_INPUTS)
_GROUP = tl.constexpr(GROUP)
_PAIR = tl.constexpr(int(Storage.PAIR))
_BYTE = tl.constexpr(int(Storage.BYTE))
_CODE = tl.constexpr(int(Storage.CODE))
_ROWS, _COLUMNS = 16, 64  # most rows and columns of a tile


@triton.jit(do_not_specialize=("entries",))
def _narrow(x, to, entries, ENTRIES: tl.constexpr):
    """Apply `storage.bf16` to float32, keeping float32 or bf16."""
    at = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(x + at, mask=at < entries, other=0.0)
    near = nearest_bf16(entry)
    found = tl.where(tl.abs(near) < _SMALLEST, 0.0, near)
    tl.store(to + at, tl.where(entry == entry, found, float("nan")), mask=at < entries)


def narrowed(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Round float32 of any shape to bf16, kept in float32 or bfloat16."""
    to = torch.empty_like(x, dtype=dtype)
    entries = tile(x.numel(), _ENTRIES)
    _narrow[(triton.cdiv(x.numel(), entries),)](x, to, x.numel(), entries, **OPTIONS)
    return to


@triton.jit
def _weights(data, scales, codes, panel, column, input, inputs, there, STORAGE: tl.constexpr):
    """Return the weights of an input, float32, for some columns of some panels (int64)."""
    if STORAGE == _CODE:
        half = tl.load(data + (panel * inputs + input) * (_PANEL // 2) + column % (_PANEL // 2), mask=there, other=0)
        wide = tl.load(codes + ((half >> (column // (_PANEL // 2) * 4).to(tl.uint8)) & 15).to(tl.int32))
    elif STORAGE == _PAIR:
        at = (panel * inputs + input // 2 * 2) * _PANEL + 2 * column + input % 2
        wide = tl.load(data + at, mask=there, other=0).to(tl.float32)
    else:
        wide = tl.load(data + (panel * inputs + input) * _PANEL + column, mask=there, other=0).to(tl.float32)
    if STORAGE >= _BYTE:
        group = panel * (inputs // _GROUP) + input // _GROUP
        wide = wide * tl.load(scales + group * _PANEL + column, mask=there, other=0.0)
    return wide


@triton.jit(do_not_specialize=("items",))
def _linear(
    x,
    codes,
    data,
    scales,
    bias,
    routes,
    to,
    items,
    inputs,
    outputs,
    panels,
    to_row,
    to_head,
    factor,
    cap,
    limit,
    slope,
    shift,
    STORAGE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # An item is a row, or one of PICKS routes of a row to experts; if SHARED, a row's routes read the same inputs.
    # Heads are the last axis of the grid.
    item, output, inside = part_of(items, outputs, ROWS, COLUMNS)
    row_there, there = (item < items)[:, None], (output < outputs)[None, :]
    panel, column = places(output, GATED)
    panel, column, wanted = panel[None, :], column[None, :], there
    if PICKS:
        expert = tl.load(routes + 2 * item, mask=item < items, other=0.0).to(tl.int64)
        panel, wanted = panel + (expert * panels)[:, None], inside
    read = item // PICKS if SHARED else item
    if HEADS > 1:
        panel += tl.program_id(2) * panels
        read = read * HEADS + tl.program_id(2)
        to += tl.program_id(2) * to_head
    read = x + read[:, None] * inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    opened = sums
    for section in range(0, inputs, _SECTION):
        of_section = tl.zeros((ROWS, COLUMNS), tl.float32)
        of_section_opened = of_section
        for first in range(section, tl.minimum(section + _SECTION, inputs), _PART):
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            part_opened = part
            for turn in range(first, tl.minimum(first + _PART, inputs)):
                input = turn ^ 1 if STORAGE == _PAIR else turn
                entry = tl.load(read + input, mask=row_there, other=0.0)
                part = tl.fma(_weights(data, scales, codes, panel, column, input, inputs, wanted, STORAGE), entry, part)
                if GATED:
                    other = _weights(data, scales, codes, panel, column + _PANEL // 2, input, inputs, wanted, STORAGE)
                    part_opened = tl.fma(other, entry, part_opened)
            of_section = behind(of_section, part, first == section)
            if GATED:
                of_section_opened = behind(of_section_opened, part_opened, first == section)
        sums = behind(sums, of_section, section == 0)
        if GATED:
            opened = behind(opened, of_section_opened, section == 0)
    ended(
        sums,
        opened,
        bias + panel * _PANEL + column,
        there,
        to + item[:, None] * to_row + output[None, :],
        inside,
        factor,
        cap,
        limit,
        slope,
        shift,
        ACTIVATION,
        GATED,
        LIMITED,
        BIASED,
        CAPPED,
        ADDS,
        SCALES,
    )


def linear(
    x: torch.Tensor,
    weight: Weight,
    to: torch.Tensor,
    *,
    activation: Activation = Activation.NONE,
    gated: bool = False,
    softcap: float = 0.0,
    add: bool = False,
    factor: float = 1.0,
    routes: torch.Tensor | None = None,
    limited: tuple[float, float, float] = (0.0, 1.0, 0.0),
    heads: int = 1,
    apart: int = 0,
) -> None:
    """Compute `steps.Linear`; with routes to experts, `ExpertLinear`; of several heads, the results of `HeadLinear`.

    Args:
        x: float32 [rows, inputs], or [rows, picks * inputs] if experts have inputs of their own, or heads.
        weight: of the layer, on the same device.
        to: float32 [rows, outputs], or [rows, picks * outputs], written to; its rows need not be adjacent.
        activation: as in `steps.Linear`.
        gated: as in `steps.Linear`.
        softcap: as in `steps.Linear`.
        add: as in `Into`.
        factor: as in `Into`.
        routes: float32 [rows, 2 * picks]; None for none.
        limited: limit, slope and shift of `ExpertLinear`.
        heads: with a weight each; then there are no routes.
        apart: entries from the results of a head to those of the next in a row of `to`.
    """
    picks = 0 if routes is None else routes.shape[1] // 2
    items, (inputs, outputs) = len(x) * (picks or 1), (weight.inputs, weight.outputs)
    shared = bool(picks) and x.shape[1] == inputs
    cores = weight.storage in RULES
    most = (core_linear.ROWS, core_linear.COLUMNS, RULES[weight.storage].inputs) if cores else (_ROWS, _COLUMNS)
    rows, columns, grid = tiles(items, outputs, *most)
    steps = None if weight.scales is None else weight.scales.steps
    kernel, read, kinds = _linear, [x, _or(weight.codes, x), weight.data, _or(steps, x)], [int(weight.storage)]
    if weight.storage.whole:
        tensors, kinds = stored(weight)
        kernel, read = whole_linear, [*rounded(x), *tensors]
    elif cores:
        kernel, kinds = core_linear.core_linear, core_linear.kinds(weight.storage)
        read = [narrowed(x, torch.bfloat16), weight.data]
    elif weight.storage == Storage.PAIR:
        read[0] = narrowed(x)
    if kernel is not _linear:  # products of matrices
        if picks:
            rows, grid = 1, (items, grid[1])
        rows, columns = max(rows, LEAST_SIDE), max(columns, LEAST_SIDE)
    kernel[*grid, heads](
        *(*read, _or(weight.bias, x), _or(routes, x), to),
        *(items, inputs, outputs, weight.columns // PANEL, outputs if picks else to.stride(0), apart),
        *(float(factor), float(softcap), *map(float, limited)),
        *(*kinds, int(activation), gated, bool(limited[0]), weight.bias is not None, bool(softcap), add, factor != 1),
        *(picks, shared, heads, rows, columns),
        **OPTIONS,
    )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor
