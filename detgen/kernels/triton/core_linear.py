"""Linear layers on tensor cores, with weights and inputs in bf16.

Promise: a part of PART_INPUTS begins at zero, and tensor cores add up its products, inputs ascending, as
`detgen/program/tensor_cores.py` describes; the sums of parts are added in order within a section of SECTION_PARTS, and
those of sections in order, as docs/numerics.md defines. The tile has no influence. A part has several products of
matrices: when a product is added to a sum, Triton starts the product from the sum.

The rule depends on the kind of device. Where tensor cores do not compute, as in Triton's interpreter, it is emulated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import INTERPRETED
from detgen.kernels.triton.linear_columns import behind, ended, of_one_weight
from detgen.program.operands import PANEL, PART_INPUTS, SECTION_PARTS
from detgen.program.storage import RULES, Storage

_PANEL = tl.constexpr(PANEL)
_PART = tl.constexpr(PART_INPUTS)
_SECTION = tl.constexpr(SECTION_PARTS * PART_INPUTS)
_TO_24_BITS = tl.constexpr(-(1 << 29))  # of a float64
_DEPTH = PART_INPUTS // 2  # inputs of a product of matrices: two per part
ROWS, COLUMNS = 64, 32  # most rows and columns of a tile; Hopper and Blackwell have instructions for 64 rows


def rule_of(device: torch.device | str) -> Storage:
    """Return the rule by which a CUDA device's tensor cores add up products of bf16."""
    return Storage.TC25 if torch.cuda.get_device_capability(device) >= (9, 0) else Storage.TC24


def rules_on(device: torch.device | str) -> tuple[Storage, ...]:
    """Return the rules that a device can compute: all in Triton's interpreter."""
    return tuple(RULES) if INTERPRETED else (rule_of(device),)


def kinds(storage: Storage) -> list[int]:
    """Return BITS and DEPTH of a product for the kernel."""
    return [*RULES[storage]] if INTERPRETED else [0, _DEPTH]


@triton.jit
def _exponent(x):
    """Return the exponents of float32, int32; zeros and subnormal numbers have the least."""
    return tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 1) - 127


@triton.jit
def _power(exponent):
    """Return 2^exponent, float64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _added(sums, x, weights, BITS: tl.constexpr):
    """Add products to the sums: by tensor cores, or, if there are BITS, emulated for inputs added together."""
    if BITS == 0:
        return tl.dot(x, weights, sums)
    x, weights, start = x.to(tl.float32), weights.to(tl.float32), sums.to(tl.float64)
    top = tl.max(_exponent(x)[:, :, None] + _exponent(weights)[None], 1)
    top = tl.maximum(top, _exponent(sums))
    products = x.to(tl.float64)[:, :, None] * weights.to(tl.float64)[None]
    plain = tl.sum(products, 1) + start
    finite, unit = tl.abs(plain) < float("inf"), _power(BITS - top)
    cut = tl.where(finite[:, None, :], products * unit[:, None, :], 0.0).to(tl.int64)
    total = tl.sum(cut, 1) + tl.where(finite, start * unit, 0.0).to(tl.int64)
    bits = total.to(tl.float64).to(tl.int64, bitcast=True) & _TO_24_BITS
    return tl.where(finite, bits.to(tl.float64, bitcast=True) * _power(top - BITS), plain).to(tl.float32)


@triton.jit(do_not_specialize=("items",))
def core_linear(
    x,
    data,
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
    BITS: tl.constexpr,
    DEPTH: tl.constexpr,
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
    """`linear._linear` for inputs in bf16."""
    item, item_there, read, output, there, panel, column = of_one_weight(
        items, outputs, panels, routes, GATED, PICKS, SHARED, HEADS, ROWS, COLUMNS
    )
    entries_of = x + read[:, None] * inputs
    if HEADS > 1:
        to += tl.program_id(2) * to_head
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    opened = sums
    for section in range(0, inputs, _SECTION):
        of_section = tl.zeros((ROWS, COLUMNS), tl.float32)
        of_section_opened = of_section
        for first in range(section, tl.minimum(section + _SECTION, inputs), _PART):
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            part_opened = part
            for turn in tl.static_range(_PART // DEPTH):
                input = first + turn * DEPTH + tl.arange(0, DEPTH)
                entries = tl.load(
                    entries_of + input[None, :], mask=item_there[:, None] & (input < inputs)[None, :], other=0.0
                )
                wanted, input = there & (input < inputs)[:, None], input[:, None]
                at = data + (panel * inputs + input // 2 * 2) * _PANEL + 2 * column + input % 2
                part = _added(part, entries, tl.load(at, mask=wanted, other=0.0), BITS)
                if GATED:
                    part_opened = _added(part_opened, entries, tl.load(at + _PANEL, mask=wanted, other=0.0), BITS)
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
