"""Linear layers of whole numbers: of weights in BYTE and NIBBLE.

Promise: the inputs of a row are rounded to whole numbers from -127 to 127 by groups of GROUP, once for all columns. A
group's sum of products is exact, in int32. An entry of the result is a chain of fused multiply-adds over the groups,
first to last, of the sum and the product of both scales, from zero in each section of SECTION_PARTS * PART_INPUTS
inputs; the sums of sections are added in their order, as docs/numerics.md says. A tile has no say in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS, tile
from detgen.kernels.triton.linear_columns import behind, ended, places
from detgen.program.operands import GROUP, LEAST, PANEL, PART_INPUTS, SECTION_PARTS
from detgen.program.storage import FORMATS, Storage

_PANEL = tl.constexpr(PANEL)
_SECTION = tl.constexpr(SECTION_PARTS * PART_INPUTS)
_GROUP = tl.constexpr(GROUP)
_LEAST = tl.constexpr(LEAST)
_TOGETHER = tl.constexpr(FORMATS[Storage.BYTE].together)
_NIBBLE = tl.constexpr(int(Storage.NIBBLE))
LEAST_SIDE = 16  # of a tile, which products of matrices have
_GROUPS = 64  # of a tile of inputs, at most


@triton.jit(do_not_specialize=("groups",))
def _round(x, whole, scales, groups, GROUPS: tl.constexpr):
    """Groups of inputs, as `arithmetic.whole_inputs` makes them whole numbers, int8, and their scales."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at, there = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :], group < groups
    entries = tl.load(x + at, mask=there[:, None], other=0.0)
    sizes = tl.abs(entries)
    finite = sizes < float("inf")
    sound = tl.min(finite.to(tl.int32), 1) == 1
    most = tl.max(tl.where(finite, sizes, 0.0), 1)
    usual = sound & (most >= _LEAST)
    factor = tl.div_rn(tl.full((GROUPS,), 127.0, tl.float32), tl.where(usual, most, 1.0))
    scaled = tl.where(usual[:, None], entries, 0.0) * factor[:, None]
    nearest = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
    tl.store(whole + at, nearest.to(tl.int32).to(tl.int8), mask=there[:, None])
    scale = tl.div_rn(most, tl.full((GROUPS,), 127.0, tl.float32))
    tl.store(scales + group, tl.where(sound, tl.where(usual, scale, 0.0), float("nan")), mask=there)


@triton.jit
def _weights(data, panel, column, input, inputs, there, STORAGE: tl.constexpr):
    """The weights, int8 [inputs, columns], of some inputs of some columns of some panels (int64)."""
    quad, entry = panel * (inputs // _TOGETHER) + input // _TOGETHER, input % _TOGETHER
    if STORAGE == _NIBBLE:
        half = _PANEL // 2
        both = tl.load(data + (quad * half + column % half) * _TOGETHER + entry, mask=there, other=0)
        return ((both >> (column // half * 4).to(tl.uint8)) & 15).to(tl.int8) - 8
    return (tl.load(data + (quad * _PANEL + column) * _TOGETHER + entry, mask=there, other=0) ^ 128).to(
        tl.int8, bitcast=True
    )


@triton.jit
def _with_group(sums, numbers, own, data, scales, panel, column, first, inputs, there, STORAGE: tl.constexpr):
    """The sums with a group of inputs, from `first` on: its `numbers`, [ROWS, GROUP], and their scales, [ROWS]."""
    input = first + tl.arange(0, _GROUP)[:, None]
    of_group = tl.dot(numbers, _weights(data, panel, column, input, inputs, there, STORAGE), out_dtype=tl.int32)
    group = panel * (inputs // _GROUP) + first // _GROUP
    scale = own[:, None] * tl.load(scales + group * _PANEL + column, mask=there, other=0.0)
    return tl.fma(of_group.to(tl.float32), scale, sums)


@triton.jit(do_not_specialize=("items",))
def whole_linear(
    x,
    own_scales,
    data,
    scales,
    bias,
    routes,
    to,
    items,
    inputs,
    outputs,
    panels,
    factor,
    cap,
    STORAGE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`linear._linear` of inputs that are `rounded`. A tile has one weight: it holds one route, and no other rows."""
    row = tl.arange(0, ROWS)
    item = tl.program_id(0).to(tl.int64) * (1 if PICKS else ROWS) + row
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item_there, there = item < items, (output < outputs)[None, :]
    panel, column = places(output, GATED)
    if PICKS:
        item_there = item_there & (row == 0)
        panel += tl.load(routes + 2 * tl.program_id(0).to(tl.int64)).to(tl.int64) * panels
    panel, column = panel[None, :], column[None, :]
    read = item // PICKS if SHARED else item
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    opened = sums
    for section in range(0, inputs, _SECTION):
        of_section = tl.zeros((ROWS, COLUMNS), tl.float32)
        of_section_opened = of_section
        for first in range(section, tl.minimum(section + _SECTION, inputs), _GROUP):
            entry = read[:, None] * inputs + first + tl.arange(0, _GROUP)[None, :]
            numbers = tl.load(x + entry, mask=item_there[:, None], other=0)
            own = tl.load(own_scales + (read * inputs + first) // _GROUP, mask=item_there, other=0.0)
            of_section = _with_group(
                of_section, numbers, own, data, scales, panel, column, first, inputs, there, STORAGE
            )
            if GATED:
                other = column + _PANEL // 2
                of_section_opened = _with_group(
                    of_section_opened, numbers, own, data, scales, panel, other, first, inputs, there, STORAGE
                )
        sums = behind(sums, of_section, section == 0)
        if GATED:
            opened = behind(opened, of_section_opened, section == 0)
    ended(
        sums,
        opened,
        bias + panel * _PANEL + column,
        there,
        to + item[:, None] * outputs + output[None, :],
        item_there[:, None] & there,
        factor,
        cap,
        ACTIVATION,
        GATED,
        BIASED,
        CAPPED,
        ADDS,
        SCALES,
    )


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, float32 [rows, n], as whole numbers, int8 [rows, n], and the scales of their groups, float32."""
    whole = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = x.new_empty(x.numel() // GROUP)
    groups = tile(len(scales), _GROUPS)
    _round[(triton.cdiv(len(scales), groups),)](x, whole, scales, len(scales), groups, **OPTIONS)
    return whole, scales
