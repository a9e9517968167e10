"""Linear layers of whole numbers.

Promise: the inputs of a row are rounded to whole numbers from -127 to 127 by groups of GROUP, once for all columns. A
group's sum of products is exact, in int32; it is multiplied by the scale of the weights, and the contribution of their
minimum is added. An entry of the result is a chain of fused multiply-adds over the groups, first to last, of this sum
and the scale of the inputs, from zero in each section of SECTION_PARTS * PART_INPUTS inputs; the sums of sections are
added in order, as docs/numerics.md defines. The tile has no influence.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import part_of, put
from detgen.kernels.triton.launching import OPTIONS, tile, tiles
from detgen.kernels.triton.linear_columns import behind, ended, of_one_weight
from detgen.program.operands import GROUP, LEAST, PANEL, PART_INPUTS, SECTION_PARTS, UNIT, Into, Weight
from detgen.program.storage import FORMATS, TOGETHER, Storage

_PANEL = tl.constexpr(PANEL)
_SECTION = tl.constexpr(SECTION_PARTS * PART_INPUTS)
_GROUP = tl.constexpr(GROUP)
_LEAST = tl.constexpr(LEAST)
_UNIT = tl.constexpr(UNIT)
_TOGETHER = tl.constexpr(TOGETHER)
_QUAD = tl.constexpr(PANEL * TOGETHER)
LEAST_SIDE = 16  # least side of a tile, for products of matrices
_GROUPS = 64  # most groups of inputs in a tile
_ROWS, _COLUMNS = 4, 256  # most rows and columns of a tile of entries


@triton.jit(do_not_specialize=("groups",))
def _round(x, whole, scales, groups, GROUPS: tl.constexpr):
    """Round groups of inputs to int8, with scales, like `arithmetic.whole_inputs`."""
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
def _plane(data, quad, place, there, BITS: tl.constexpr):
    """Return the bits of a plane that begins at `quad`, int32, for weights by their `place` in it."""
    length: tl.constexpr = _QUAD * BITS // 8
    both = tl.load(data + quad + place % length, mask=there, other=0).to(tl.int32)
    return (both >> (place // length * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _weights(
    data, levels, panel, column, input, inputs, there, LOW: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Return the weights, int8 [inputs, columns], of some inputs and columns of some panels (int64)."""
    quad = (panel * (inputs // _TOGETHER) + input // _TOGETHER) * ((LOW + HIGH) * _QUAD // 8)
    place = column * _TOGETHER + input % _TOGETHER
    code = _plane(data, quad, place, there, LOW)
    if HIGH:
        code = code | (_plane(data, quad + LOW * _QUAD // 8, place, there, HIGH) << LOW)
    if LEVELS:
        return tl.load(levels + code)
    return (code + LEAST).to(tl.int8)


@triton.jit
def _scale(steps, units, panel, column, first, inputs, there, GROUP_OF: tl.constexpr, IN_UNITS: tl.constexpr):
    """Return scales or minima, float32, of the group of weights that begins with input `first`."""
    at = (panel * (inputs // GROUP_OF) + first // GROUP_OF) * _PANEL + column
    scale = tl.load(steps + at, mask=there, other=0).to(tl.float32)
    if IN_UNITS:
        unit = tl.load(units + (panel * (inputs // _UNIT) + first // _UNIT) * _PANEL + column, mask=there, other=0.0)
        scale = scale * unit.to(tl.float32)
    return scale


@triton.jit
def _with_group(
    sums, numbers, own, data, levels, steps, units, minima, minimum_units, panel, column, first, inputs, there,
    LOW: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr, LEAST: tl.constexpr, HALVES: tl.constexpr,
    IN_UNITS: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Add a group of inputs, from `first` on, to the sums: its `numbers`, [ROWS, GROUP], and their scales, [ROWS]."""
    entry = tl.arange(0, _GROUP)
    weights = _weights(data, levels, panel, column, first + entry[:, None], inputs, there, LOW, HIGH, LEVELS, LEAST)
    of: tl.constexpr = _GROUP // HALVES
    scaled = tl.zeros(sums.shape, tl.float32)
    for half in tl.static_range(HALVES):
        # A dot product takes at least as many inputs as a group has: those of the other half count as zeros.
        some = tl.where(entry[None, :] // of == half, numbers, 0).to(tl.int8)
        product = tl.dot(some, weights, out_dtype=tl.int32).to(tl.float32)
        scale = _scale(steps, units, panel, column, first + half * of, inputs, there, of, IN_UNITS)
        scaled = tl.fma(product, scale, scaled) if half else product * scale
    if MINIMA:
        for half in tl.static_range(HALVES):
            some = tl.where(entry[None, :] // of == half, numbers, 0).to(tl.int32)
            minimum = _scale(minima, minimum_units, panel, column, first + half * of, inputs, there, of, IN_UNITS)
            scaled = tl.fma(tl.sum(some, 1).to(tl.float32)[:, None], minimum, scaled)
    return tl.fma(scaled, own[:, None], sums)


@triton.jit(do_not_specialize=("items",))
def whole_linear(
    x,
    own_scales,
    data,
    levels,
    steps,
    units,
    minima,
    minimum_units,
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
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAST: tl.constexpr,
    HALVES: tl.constexpr,
    IN_UNITS: tl.constexpr,
    MINIMA: tl.constexpr,
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
    """`linear._linear` for inputs that are `rounded`."""
    item, item_there, read, output, there, panel, column = of_one_weight(
        items, outputs, panels, routes, GATED, PICKS, SHARED, HEADS, ROWS, COLUMNS
    )
    if HEADS > 1:
        to += tl.program_id(2) * to_head
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
                of_section, numbers, own, data, levels, steps, units, minima, minimum_units, panel, column, first,
                inputs, there, LOW, HIGH, LEVELS, LEAST, HALVES, IN_UNITS, MINIMA,
            )  # fmt: skip
            if GATED:
                of_section_opened = _with_group(
                    of_section_opened, numbers, own, data, levels, steps, units, minima, minimum_units, panel,
                    column + _PANEL // 2, first, inputs, there, LOW, HIGH, LEVELS, LEAST, HALVES, IN_UNITS, MINIMA,
                )  # fmt: skip
        sums = behind(sums, of_section, section == 0)
        if GATED:
            opened = behind(opened, of_section_opened, section == 0)
    ended(
        sums,
        opened,
        bias + panel * _PANEL + column,
        there,
        to + item[:, None] * to_row + output[None, :],
        item_there[:, None] & there,
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


@triton.jit(do_not_specialize=("rows",))
def _embed_column(
    data, levels, steps, units, minima, minimum_units, ids, to, rows, inputs, factor, LOW: tl.constexpr,
    HIGH: tl.constexpr, LEVELS: tl.constexpr, LEAST: tl.constexpr, HALVES: tl.constexpr, IN_UNITS: tl.constexpr,
    MINIMA: tl.constexpr, ADDS: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, input, there = part_of(rows, inputs, ROWS, COLUMNS)
    id, input = tl.load(ids + row, mask=row < rows, other=0)[:, None], input[None, :]
    panel, column, read, of = id // _PANEL, id % _PANEL, there & (id >= 0), _GROUP // HALVES
    weight = _weights(data, levels, panel, column, input, inputs, read, LOW, HIGH, LEVELS, LEAST).to(tl.float32)
    x = weight * _scale(steps, units, panel, column, input, inputs, read, of, IN_UNITS)
    if MINIMA:
        x = x + _scale(minima, minimum_units, panel, column, input, inputs, read, of, IN_UNITS)
    x = tl.where(id < 0, tl.where(id == -1, 0.0, float("nan")), x)
    put(to + row[:, None] * inputs + input, x, there, factor, ADDS, SCALES)


def embed_column(weight: Weight, ids: torch.Tensor, into: Into, to: torch.Tensor) -> None:
    """Compute `steps.EmbedColumn`: columns of a weight, for ids, int64 [rows], into float32 [rows, inputs]."""
    rows, columns, grid = tiles(len(to), weight.inputs, _ROWS, _COLUMNS)
    tensors, kinds = stored(weight)
    _embed_column[grid](
        *(*tensors, ids, to, len(to), weight.inputs, float(into.factor)),
        *(*kinds, into.add, into.factor != 1, rows, columns),
        **OPTIONS,
    )


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs, float32 [rows, n], to int8 [rows, n]; return them and the scales of their groups, float32."""
    whole = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = x.new_empty(x.numel() // GROUP)
    groups = tile(len(scales), _GROUPS)
    _round[(triton.cdiv(len(scales), groups),)](x, whole, scales, len(scales), groups, **OPTIONS)
    return whole, scales


def stored(weight: Weight) -> tuple[list[torch.Tensor], list[int | bool]]:
    """Return a weight of whole numbers in the form that the kernel takes: tensors, and constants that describe them."""
    made, scales = FORMATS[weight.storage], weight.scales
    assert scales is not None
    others = (scales.units, scales.minima, scales.minimum_units)
    levels = _levels(weight.storage, weight.data.device) if made.levels else weight.data
    tensors = [weight.data, levels, scales.steps, *(scales.steps if other is None else other for other in others)]
    low, high = (*made.planes, 0)[:2]
    kinds = [GROUP // scales.group, scales.units is not None, scales.minima is not None]
    return tensors, [low, high, bool(made.levels), weight.least, *kinds]


@cache
def _levels(storage: Storage, device: torch.device) -> torch.Tensor:
    return torch.tensor(FORMATS[storage].levels, dtype=torch.int8, device=device)
