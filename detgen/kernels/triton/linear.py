"""A linear layer whose rows do not depend on how many there are: the way where no vendor's kernel has one class.

Promise: an element of the result is the sum over the inputs in blocks of DEPTH, the first one first, in one program;
DEPTH is the same for all, and no program computes a part of a sum. Tiles are as high as the rows ask for;
that a tile's height does not change what a tensor core makes of a row has to be tried on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import INTERPRETED, OPTIONS, product

_HEIGHTS = (16, 64)  # rows of a tile
_COLUMNS = 64  # of a tile
_DEPTH = 64  # inputs of a block
_GROUPED = 8  # tiles of rows that read the same weights one after the other


@triton.jit
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    ADDS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Programs that run at a time share weights: a group of tiles of rows goes over the columns together.
    high, wide = tl.cdiv(rows, HEIGHT), tl.cdiv(outputs, COLUMNS)
    of_group = GROUPED * wide
    first = tl.program_id(0) // of_group * GROUPED
    grouped = tl.minimum(high - first, GROUPED)
    row = (first + tl.program_id(0) % of_group % grouped) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(0) % of_group // grouped * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    xs = x + row.to(tl.int64)[:, None] * inputs + at[None, :]
    ws = weight + column.to(tl.int64)[None, :] * inputs + at[:, None]
    total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for k in range(0, inputs, DEPTH):
        a = tl.load(xs + k, mask=(row < rows)[:, None] & (k + at < inputs)[None, :], other=0.0)
        b = tl.load(ws + k, mask=(column < outputs)[None, :] & (k + at < inputs)[:, None], other=0.0)
        total = product(a, b, total, INTERPRETED)
    if ADDS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (column < outputs)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, added up in float32.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs], in the same type.
        bias: [outputs]; None for none.

    Returns:
        [rows, outputs], in the type of x; `F.linear` is the reference.
    """
    x, weight = x.contiguous(), weight.contiguous()
    (rows, inputs), outputs = x.shape, len(weight)
    height = next((h for h in _HEIGHTS if h >= rows), _HEIGHTS[-1])
    out = x.new_empty(rows, outputs)
    _linear[(triton.cdiv(rows, height) * triton.cdiv(outputs, _COLUMNS),)](
        *(x, weight, weight if bias is None else bias, out, rows, inputs, outputs),
        *(bias is not None, height, _COLUMNS, _DEPTH, _GROUPED, INTERPRETED),
        **OPTIONS,
    )
    return out
