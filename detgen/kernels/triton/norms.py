"""Steps with sums over a row: norms, softmax, sums, the choice of experts.

Promise: a row is cut into blocks of SUM_BLOCK entries. Each block is summed in sixteen lanes, by an entry's place,
first to last, and folded; the blocks' sums are summed in the same way, by a block's number (docs/numerics.md). A
program takes some rows, and BLOCKS blocks of each at a time, which has no influence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import activated, exponential, fold, put, sigmoid
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.experts import Route
from detgen.program.operands import SUM_BLOCK, Activation, Scoring
from detgen.program.steps import GaussianTopK, Norm

_BLOCK, _RELU = tl.constexpr(SUM_BLOCK), tl.constexpr(int(Activation.RELU))
_OVER_ALL, _OVER_PICKS, _SIGMOIDS, _SIGMOIDS_OF_PICKS, _SPARSE = (tl.constexpr(int(scoring)) for scoring in Scoring)
_AT_A_TIME = 16  # blocks of a program: at most as many per row as there are lanes for their sums
_ROUTED = 2  # rows of a program that chooses experts


@triton.jit
def _parts(ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return, of some blocks of some rows, each block's row, [ROWS * BLOCKS], and first places, [ROWS * BLOCKS, 16]."""
    part = tl.arange(0, ROWS * BLOCKS)
    return part // BLOCKS, (part % BLOCKS * _BLOCK)[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def _of_blocks(lanes, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the sums of blocks, [ROWS * BLOCKS, 16] -> [ROWS, BLOCKS]."""
    return tl.reshape(fold(lanes, ROWS * BLOCKS), (ROWS, BLOCKS))


@triton.jit
def _each(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Repeat a row's number for all of its blocks, [ROWS] -> [ROWS * BLOCKS, 1]."""
    return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS, 1))


@triton.jit
def _total(read, there, place, size, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the sums of rows, [ROWS]."""
    sums = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, size, BLOCKS * _BLOCK):
        lanes = tl.zeros((ROWS * BLOCKS, 16), tl.float32)
        for step in tl.static_range(0, _BLOCK, 16):
            at = first + step + place
            lanes += tl.load(read + at, mask=there & (at < size), other=0.0)
        sums += _of_blocks(lanes, ROWS, BLOCKS)
    return fold(sums, ROWS, BLOCKS)


@triton.jit
def _mean(read, there, place, size, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the means of rows, [ROWS * BLOCKS, 1]."""
    entries = tl.zeros((ROWS,), tl.float32) + size
    return _each(tl.div_rn(_total(read, there, place, size, ROWS, BLOCKS), entries), ROWS, BLOCKS)


@triton.jit
def _mean_square(read, there, place, size, mean, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the mean squares of rows, less their means if CENTRED, [ROWS]."""
    sums = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, size, BLOCKS * _BLOCK):
        lanes = tl.zeros((ROWS * BLOCKS, 16), tl.float32)
        for step in tl.static_range(0, _BLOCK, 16):
            inside = first + step + place < size
            v = tl.load(read + first + step + place, mask=there & inside, other=0.0)
            if CENTRED:
                v = tl.where(inside, v - mean, 0.0)
            lanes = tl.fma(v, v, lanes)
        sums += _of_blocks(lanes, ROWS, BLOCKS)
    return tl.div_rn(fold(sums, ROWS, BLOCKS), tl.zeros((ROWS,), tl.float32) + size)


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
    least,
    factor,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    OWN: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    beside, place = _parts(ROWS, BLOCKS)
    vector = tl.program_id(0) * ROWS + beside
    row, number, there = (vector // vectors).to(tl.int64), vector % vectors, (vector < count)[:, None]
    read = x + (row * x_width + at + number * size)[:, None]
    wrote = to + (row * to_width + at + number * size)[:, None]
    own = (number * size if OWN else number * 0)[:, None]
    mean = tl.zeros((ROWS * BLOCKS, 1), tl.float32)
    if CENTRED:
        mean = _mean(read, there, place, size, ROWS, BLOCKS)
    found = _mean_square(read, there, place, size, mean, CENTRED, ROWS, BLOCKS)
    scale = tl.sqrt_rn(tl.where(found < least, least, found) + epsilon)
    scale = _each(tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale), ROWS, BLOCKS)
    for first in range(0, size, BLOCKS * _BLOCK):
        for step in tl.static_range(0, _BLOCK, 16):
            entry = first + step + place
            inside = there & (entry < size)
            v = tl.load(read + entry, mask=inside, other=0.0)
            if CENTRED:
                v = v - mean
            v = v * scale
            if BIASED:
                w = tl.load(weight + own + entry, mask=inside, other=0.0)
                v = tl.fma(v, w, tl.load(bias + own + entry, mask=inside, other=0.0))
            elif WEIGHTED:
                v = v * tl.load(weight + own + entry, mask=inside, other=0.0)
            put(wrote + entry, v, inside, factor, ADDS, SCALES)


@triton.jit(do_not_specialize=("count",))
def _gaussian_top_k(x, to, count, size, deviations, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    beside, place = _parts(ROWS, BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + beside
    there, read, wrote = (row < count)[:, None], x + row[:, None] * size, to + row[:, None] * size
    mean = _mean(read, there, place, size, ROWS, BLOCKS)
    found = _mean_square(read, there, place, size, mean, True, ROWS, BLOCKS)
    cut = _each(tl.sqrt_rn(found) * deviations, ROWS, BLOCKS)
    for first in range(0, size, BLOCKS * _BLOCK):
        for step in tl.static_range(0, _BLOCK, 16):
            at = first + step + place
            inside = there & (at < size)
            v = tl.load(read + at, mask=inside, other=0.0) - mean - cut
            tl.store(wrote + at, activated(v, _RELU), mask=inside)


@triton.jit
def _largest_and_total(read, there, place, size, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the largest entry of rows, and the sum of e^(x - largest), [ROWS] each."""
    most = tl.full((ROWS * BLOCKS, 16), float("-inf"), tl.float32)
    for first in range(0, size, BLOCKS * _BLOCK):
        for step in tl.static_range(0, _BLOCK, 16):
            at = first + step + place
            v = tl.load(read + at, mask=there & (at < size), other=float("-inf"))
            most = tl.where(v > most, v, most)
    largest = tl.max(tl.reshape(most, (ROWS, BLOCKS * 16)), 1)
    shift = _each(largest, ROWS, BLOCKS)
    sums = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, size, BLOCKS * _BLOCK):
        lanes = tl.zeros((ROWS * BLOCKS, 16), tl.float32)
        for step in tl.static_range(0, _BLOCK, 16):
            inside = first + step + place < size
            v = tl.load(read + first + step + place, mask=there & inside, other=0.0)
            lanes += tl.where(inside, exponential(v - shift), 0.0)
        sums += _of_blocks(lanes, ROWS, BLOCKS)
    return largest, fold(sums, ROWS, BLOCKS)


@triton.jit(do_not_specialize=("count",))
def _softmax(x, to, count, size, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    beside, place = _parts(ROWS, BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + beside
    there, read, wrote = (row < count)[:, None], x + row[:, None] * size, to + row[:, None] * size
    largest, total = _largest_and_total(read, there, place, size, ROWS, BLOCKS)
    shift, divisor = _each(largest, ROWS, BLOCKS), _each(total, ROWS, BLOCKS)
    for first in range(0, size, BLOCKS * _BLOCK):
        for step in tl.static_range(0, _BLOCK, 16):
            at = first + step + place
            inside = there & (at < size)
            v = exponential(tl.load(read + at, mask=inside, other=0.0) - shift)
            tl.store(wrote + at, tl.div_rn(v, divisor), mask=inside)


@triton.jit(do_not_specialize=("count",))
def _sum(x, to, count, size, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    beside, place = _parts(ROWS, BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS
    read = x + (row + beside)[:, None] * size
    total = _total(read, (row + beside < count)[:, None], place, size, ROWS, BLOCKS)
    row += tl.arange(0, ROWS)
    tl.store(to + row, total, mask=row < count)


@triton.jit
def _taken(x, there, number, PICKS: tl.constexpr, MOST: tl.constexpr):
    """Return which entries that exist, [ROWS, MOST], are the largest of a row; of ties, those of lowest number."""
    free = there
    for _ in tl.static_range(PICKS):
        most = tl.max(tl.where(free, x, float("-inf")), 1)[:, None]
        best = tl.min(tl.where(free & (x == most), number, MOST), 1)[:, None]
        free = free & (number != best)
    return there & (free == 0)


@triton.jit(do_not_specialize=("count",))
def _route(
    x,
    correction,
    factors,
    routes,
    count,
    experts,
    factor,
    added,
    spread,
    PICKS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCORING: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    BEST_GROUPS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    beside, place = _parts(ROWS, BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS
    each = (row + beside)[:, None]
    largest, total = _largest_and_total(x + each * experts, each < count, place, experts, ROWS, BLOCKS)
    row += tl.arange(0, ROWS)
    number = tl.arange(0, EXPERTS)[None, :] + tl.zeros((ROWS, EXPERTS), tl.int32)
    inside = (row < count)[:, None] & (number < experts)
    logit = tl.load(x + row[:, None] * experts + number, mask=inside, other=0.0)
    if (SCORING == _SIGMOIDS) | (SCORING == _SIGMOIDS_OF_PICKS):
        score = sigmoid(logit)
    else:
        score = exponential(logit - largest[:, None])
        if SCORING == _OVER_ALL:
            score = tl.div_rn(score, total[:, None])
    ranked = logit if (SCORING != _OVER_ALL) & (SCORING != _SIGMOIDS) else score
    if CORRECTED:
        ranked += tl.load(correction + number, mask=inside, other=0.0)
    ranked = tl.where((number < experts) & (ranked == ranked), ranked, float("-inf"))
    if GROUPS > 1:
        group, of = (
            tl.arange(0, MOST_GROUPS)[None, :] + tl.zeros((ROWS, MOST_GROUPS), tl.int32),
            number // (experts // GROUPS),
        )
        best = tl.full((ROWS, MOST_GROUPS), float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where((of == g) & (number < experts), ranked, float("-inf"))
            most = tl.max(own, 1)[:, None]
            if OF_GROUP == 2:
                first = tl.min(tl.where((of == g) & (own == most), number, EXPERTS), 1)[:, None]
                most += tl.max(tl.where(number == first, float("-inf"), own), 1)[:, None]
            best = tl.where(group == g, most, best)
        chosen = _taken(best, group < GROUPS, group, BEST_GROUPS, MOST_GROUPS)
        left = number < 0
        for g in tl.static_range(GROUPS):
            left = left | ((of == g) & (tl.max((chosen & (group == g)).to(tl.int32), 1) > 0)[:, None])
        ranked = tl.where(left, ranked, float("-inf"))
    taken = _taken(ranked, number < experts, number, PICKS, EXPERTS)
    if SCORING == _SPARSE:
        left = number < experts
        for _ in tl.static_range(PICKS):
            most = tl.max(tl.where(left, ranked, float("-inf")), 1)[:, None]
            best = tl.min(tl.where(left & (ranked == most), number, EXPERTS), 1)[:, None]
            far = tl.div_rn(most - logit, tl.maximum(tl.abs(logit), most)) > spread
            share = tl.where(left & (far == 0), exponential(logit - most), 0.0)
            total = tl.zeros((ROWS,), tl.float32)
            for expert in range(experts):
                total += tl.sum(tl.where(number == expert, share, 0.0), 1)  # one of them, and zeros
            score = tl.where(number == best, tl.div_rn(1.0, total[:, None]), score)
            left = left & (number != best)
    place = tl.cumsum(taken.to(tl.int32), 1) - 1  # in order of the experts' numbers
    weight = score
    if NORMALIZED:
        together = tl.zeros((ROWS,), tl.float32)
        for pick in tl.static_range(PICKS):
            together += tl.sum(tl.where(taken & (place == pick), score, 0.0), 1)  # one of them, and zeros
        if SCORING == _SIGMOIDS:
            together += added
        weight = tl.div_rn(score, together[:, None])
    if SCALES:
        weight = weight * factor
    if FACTORS:
        weight = weight * tl.load(factors + number, mask=inside, other=0.0)
    to = routes + row[:, None] * (2 * PICKS) + 2 * place
    tl.store(to, number.to(tl.float32), mask=taken & inside)
    tl.store(to + 1, weight, mask=taken & inside)


def _shape(count: int, size: int) -> tuple[int, int]:
    """Return the rows of a program, for `count` rows of `size` entries, and how many blocks it adds at once."""
    blocks = min(above(triton.cdiv(size, SUM_BLOCK), 1), _AT_A_TIME)
    return tile(count, _AT_A_TIME // blocks), blocks


def norm(step: Norm, x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Norm` of x, float32 [rows, width], into a tensor of the same kind."""
    count = len(x) * step.vectors
    rows, blocks = _shape(count, step.size)
    weight, bias = (x if t is None else t for t in (step.weight, step.bias))
    _norm[(triton.cdiv(count, rows),)](
        *(x, weight, bias, to, count, step.vectors, step.size, x.shape[1], to.shape[1], step.at),
        *(float(step.epsilon), float(step.least), float(step.to.factor)),
        *(step.centred, step.weight is not None, step.bias is not None, step.own, step.to.add, step.to.factor != 1),
        *(rows, blocks),
        num_warps=1,
        **OPTIONS,
    )


def gaussian_top_k(step: GaussianTopK, x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.GaussianTopK` of x, float32 [rows, size], into a tensor of the same shape."""
    rows, blocks = _shape(*x.shape)
    _gaussian_top_k[(triton.cdiv(len(x), rows),)](
        x, to, *x.shape, float(step.deviations), rows, blocks, num_warps=1, **OPTIONS
    )


def softmax(x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Softmax` of x, float32 [rows, size], into a tensor of the same shape."""
    rows, blocks = _shape(*x.shape)
    _softmax[(triton.cdiv(len(x), rows),)](x, to, *x.shape, rows, blocks, num_warps=1, **OPTIONS)


def sum_of(x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Sum` of x, float32 [rows, size], into [rows, 1]."""
    rows, blocks = _shape(*x.shape)
    _sum[(triton.cdiv(len(x), rows),)](x, to, *x.shape, rows, blocks, num_warps=1, **OPTIONS)


def route(step: Route, x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Route` of x, float32 [rows, experts], into [rows, 2 * picks]; x is not changed."""
    (count, experts), (_, blocks) = x.shape, _shape(*x.shape)
    rows, (correction, factors) = tile(count, _ROUTED), (x if t is None else t for t in (step.correction, step.factors))
    _route[(triton.cdiv(count, rows),)](
        *(x, correction, factors, to, count, experts, float(step.factor), float(step.added), float(step.spread)),
        *(to.shape[1] // 2, step.normalized, int(step.scoring)),
        *(step.correction is not None, step.groups, step.best_groups, step.of_group, step.factor != 1),
        step.factors is not None,
        *(above(experts), above(step.groups), rows, blocks),
        num_warps=1,
        **OPTIONS,
    )
