"""The statistics of a row of logits by which tokens are chosen: see `steps.ScoredLinear` and `steps.Score`.

Promise: they depend only on the row's logits. A row is cut into blocks of LOGIT_BLOCK; sums are made in sixteen lanes,
in a block by an entry's place and in a row by a block's number, and folded (docs/numerics.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import exponential, fold, logarithm
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.operands import LOGIT_BLOCK, SCORED

_BLOCK = tl.constexpr(LOGIT_BLOCK)
_SCORED = tl.constexpr(SCORED)
_BLOCKS = 8  # most blocks of a program


@triton.jit
def _of_blocks(logits, to, size, blocks, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = tl.arange(0, _BLOCK)[None, :]
    place, there = block[:, None] * _BLOCK + at, block < blocks
    x = tl.load(logits + row * size + place, mask=place < size, other=float("-inf"))
    top = tl.max(tl.where(x == x, x, float("-inf")), 1)
    found = tl.min(tl.where(x == top[:, None], at, _BLOCK), 1)
    next = tl.max(tl.where((at == found[:, None]) | (x != x), float("-inf"), x), 1)
    shift = tl.where(top > float("-inf"), top, 0.0)[:, None]
    total = tl.zeros((BLOCKS, 16), tl.float32)
    for step in tl.static_range(_BLOCK // 16):
        place = block[:, None] * _BLOCK + 16 * step + tl.arange(0, 16)[None, :]
        total += exponential(tl.load(logits + row * size + place, mask=place < size, other=float("-inf")) - shift)
    to += row * _SCORED * blocks + block
    tl.store(to, top, mask=there)
    tl.store(to + blocks, next, mask=there)
    tl.store(to + 2 * blocks, fold(total, BLOCKS), mask=there)
    tl.store(to + 3 * blocks, tl.where(found < _BLOCK, found, 0).to(tl.float32, bitcast=True), mask=there)


@triton.jit
def _of_row(x, to, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * _SCORED * blocks
    block = tl.arange(0, BLOCKS)
    tops = tl.load(x + block, mask=block < blocks, other=float("-inf"))
    nexts = tl.load(x + blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(tops, 0)
    best = tl.min(tl.where(tops == top, block, blocks), 0)
    best = tl.where(best < blocks, best, 0)
    next = tl.max(tl.where(block == best, nexts, tops), 0)
    at = tl.load(x + 3 * blocks + best).to(tl.int32, bitcast=True) + best * _BLOCK
    total = tl.zeros((1, 16), tl.float32)
    for first in range(0, blocks, 16):
        number = first + tl.arange(0, 16)[None, :]
        largest = tl.load(x + number, mask=number < blocks, other=float("-inf"))
        share = tl.load(x + 2 * blocks + number, mask=number < blocks, other=0.0)
        total += share * exponential(largest - top)
    sum = fold(total, 1)
    sound = (sum > 0.0) & (sum < float("inf"))
    log = tl.where(sound, logarithm(tl.where(sound, sum, 1.0).to(tl.float64)).to(tl.float32), sum - sum)
    to += row * _SCORED + tl.arange(0, 1)
    tl.store(to, top)
    tl.store(to + 1, next)
    tl.store(to + 2, log)
    tl.store(to + 3, at.to(tl.float32, bitcast=True))


def of_blocks(logits: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.ScoredLinear`'s results from logits, float32 [rows, vocabulary], into [rows, SCORED * blocks]."""
    (rows, size), blocks = logits.shape, to.shape[1] // SCORED
    some = tile(blocks, _BLOCKS)
    _of_blocks[(rows, triton.cdiv(blocks, some))](logits, to, size, blocks, some, **OPTIONS)


def of_rows(x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Score`: float32 [rows, SCORED * blocks] into [rows, SCORED]."""
    blocks = x.shape[1] // SCORED
    _of_row[(len(x),)](x, to, blocks, above(blocks), num_warps=1, **OPTIONS)
