"""Steps with sums over a row: norms, softmax, sums, the choice of experts.

Promise: a sum is made in sixteen lanes, by an entry's place in its row, first to last, and folded (docs/numerics.md). A
program takes some rows, and has no say in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import exponential, fold, put
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.experts import Route
from detgen.program.steps import Norm

_ROWS = 2  # of a program


@triton.jit(do_not_specialize=("count",))
def _norm(
    x,
    weight,
    bias,
    to,
    count,
    vectors,
    size,
    x_width,
    to_width,
    at,
    epsilon,
    factor,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    OWN: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, number = (vector // vectors).to(tl.int64), vector % vectors
    there, lane = (vector < count)[:, None], tl.arange(0, 16)[None, :]
    read = x + (row * x_width + at + number * size)[:, None]
    wrote = to + (row * to_width + at + number * size)[:, None]
    own = (number * size if OWN else number * 0)[:, None]
    entries = tl.zeros((ROWS,), tl.float32) + size
    mean = tl.zeros((ROWS, 1), tl.float32)
    if CENTRED:
        total = tl.zeros((ROWS, 16), tl.float32)
        for first in range(0, size, 16):
            total += tl.load(read + first + lane, mask=there & (first + lane < size), other=0.0)
        mean = tl.div_rn(fold(total, ROWS), entries)[:, None]
    total = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, size, 16):
        v = tl.load(read + first + lane, mask=there & (first + lane < size), other=0.0)
        if CENTRED:
            v = tl.where(first + lane < size, v - mean, 0.0)
        total = tl.fma(v, v, total)
    scale = tl.sqrt_rn(tl.div_rn(fold(total, ROWS), entries) + epsilon)
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)[:, None]
    for first in range(0, size, 16):
        inside = there & (first + lane < size)
        v = tl.load(read + first + lane, mask=inside, other=0.0)
        if CENTRED:
            v = v - mean
        v = v * scale
        if BIASED:
            w = tl.load(weight + own + first + lane, mask=inside, other=0.0)
            v = tl.fma(v, w, tl.load(bias + own + first + lane, mask=inside, other=0.0))
        elif WEIGHTED:
            v = v * tl.load(weight + own + first + lane, mask=inside, other=0.0)
        put(wrote + first + lane, v, inside, factor, ADDS, SCALES)


@triton.jit
def _largest_and_total(read, there, size, ROWS: tl.constexpr):
    """The largest entry of rows, and the sum of e^(x - largest), [ROWS, 1] each."""
    lane = tl.arange(0, 16)[None, :]
    most = tl.full((ROWS, 16), float("-inf"), tl.float32)
    for first in range(0, size, 16):
        v = tl.load(read + first + lane, mask=there & (first + lane < size), other=float("-inf"))
        most = tl.where(v > most, v, most)
    largest = tl.max(most, 1)[:, None]
    total = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, size, 16):
        inside = first + lane < size
        v = tl.load(read + first + lane, mask=there & inside, other=0.0)
        total += tl.where(inside, exponential(v - largest), 0.0)
    return largest, fold(total, ROWS)[:, None]


@triton.jit(do_not_specialize=("count",))
def _softmax(x, to, count, size, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, lane = (row < count)[:, None], tl.arange(0, 16)[None, :]
    read = x + row[:, None] * size
    largest, total = _largest_and_total(read, there, size, ROWS)
    for first in range(0, size, 16):
        inside = there & (first + lane < size)
        v = exponential(tl.load(read + first + lane, mask=inside, other=0.0) - largest)
        tl.store(to + row[:, None] * size + first + lane, tl.div_rn(v, total), mask=inside)


@triton.jit(do_not_specialize=("count",))
def _sum(x, to, count, size, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, lane = (row < count)[:, None], tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, size, 16):
        at = x + row[:, None] * size + first + lane
        total += tl.load(at, mask=there & (first + lane < size), other=0.0)
    tl.store(to + row, fold(total, ROWS), mask=row < count)


@triton.jit(do_not_specialize=("count",))
def _route(
    x,
    routes,
    count,
    experts,
    PICKS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number, there = tl.arange(0, EXPERTS)[None, :], (row < count)[:, None]
    read, inside = x + row[:, None] * experts, there & (number < experts)
    largest, total = _largest_and_total(read, there, experts, ROWS)
    chance = tl.div_rn(exponential(tl.load(read + number, mask=inside, other=0.0) - largest), total)
    # What is no number is the least probable, and what is no expert less than that.
    left = tl.where(number < experts, tl.where(chance == chance, chance, -1.0), -2.0)
    taken = number < 0
    for _ in tl.static_range(PICKS):
        most = tl.max(left, 1)[:, None]
        best = tl.min(tl.where(left == most, number, EXPERTS), 1)[:, None]
        taken = taken | (number == best)
        left = tl.where(number == best, -3.0, left)
    place = tl.cumsum(taken.to(tl.int32), 1) - 1  # in order of their numbers
    weight = chance
    if NORMALIZED:
        together = tl.zeros((ROWS,), tl.float32)
        for pick in tl.static_range(PICKS):
            together += tl.max(tl.where(taken & (place == pick), chance, -1.0), 1)
        weight = tl.div_rn(chance, together[:, None])
    to = routes + row[:, None] * (2 * PICKS) + 2 * place
    tl.store(to, number.to(tl.float32), mask=taken & inside)
    tl.store(to + 1, weight, mask=taken & inside)


def norm(step: Norm, x: torch.Tensor, to: torch.Tensor) -> None:
    """`steps.Norm` of x, float32 [rows, width], into a tensor like that."""
    count = len(x) * step.vectors
    rows = tile(count, _ROWS)
    weight, bias = (x if t is None else t for t in (step.weight, step.bias))
    _norm[(triton.cdiv(count, rows),)](
        *(x, weight, bias, to, count, step.vectors, step.size, x.shape[1], to.shape[1], step.at),
        *(float(step.epsilon), float(step.to.factor)),
        *(step.centred, step.weight is not None, step.bias is not None, step.own, step.to.add, step.to.factor != 1),
        rows,
        num_warps=1,
        **OPTIONS,
    )


def softmax(x: torch.Tensor, to: torch.Tensor) -> None:
    """`steps.Softmax` of x, float32 [rows, size], into a tensor like that."""
    rows = tile(len(x), _ROWS)
    _softmax[(triton.cdiv(len(x), rows),)](x, to, *x.shape, rows, num_warps=1, **OPTIONS)


def sum_of(x: torch.Tensor, to: torch.Tensor) -> None:
    """`steps.Sum` of x, float32 [rows, size], into [rows, 1]."""
    rows = tile(len(x), _ROWS)
    _sum[(triton.cdiv(len(x), rows),)](x, to, *x.shape, rows, num_warps=1, **OPTIONS)


def route(step: Route, x: torch.Tensor, to: torch.Tensor) -> None:
    """`steps.Route` of x, float32 [rows, experts], into [rows, 2 * picks]; x stays as it is."""
    rows, experts = tile(len(x), _ROWS), x.shape[1]
    _route[(triton.cdiv(len(x), rows),)](
        *(x, to, *x.shape, to.shape[1] // 2, step.normalized, above(experts), rows), num_warps=1, **OPTIONS
    )
