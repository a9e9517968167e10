"""Steps that compute each entry of a row on its own: embeddings, rotation, copies, activations, sums of experts.

Promise: an entry depends only on those at its place in its own row, and on the row's token and position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import activated, nearest_bf16, part_of, put, tangent
from detgen.kernels.triton.launching import OPTIONS, above, tile, tiles
from detgen.program.finite import most
from detgen.program.operands import PAGE, Activation, Into
from detgen.program.steps import Mix, Rotate, Xielu
from detgen.program.storage import Storage

_PAGE = tl.constexpr(PAGE)
_ROWS, _COLUMNS = 1, 256  # most rows and columns of a tile


@triton.jit(do_not_specialize=("rows",))
def _embed(
    table,
    ids,
    to,
    rows,
    offset,
    width,
    factor,
    PANEL: tl.constexpr,
    TOGETHER: tl.constexpr,
    KNOWN: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    id = (tl.load(ids + row, mask=row < rows, other=0) + offset)[:, None]
    if KNOWN:
        id = tl.where(id < KNOWN, id, 0)
    first = id // PANEL * PANEL * width + id % PANEL * TOGETHER
    at = (column // TOGETHER * PANEL * TOGETHER + column % TOGETHER)[None, :]
    x = tl.load(table + first + at, mask=there & (id >= 0), other=0.0).to(tl.float32)
    x = tl.where(id < -1, float("nan"), x)
    put(to + row[:, None] * width + column[None, :], x, there, factor, ADDS, SCALES)


@triton.jit(do_not_specialize=("rows",))
def _copy(
    x,
    more,
    to,
    rows,
    width,
    apart,
    more_apart,
    to_apart,
    factor,
    bound,
    TAKES: tl.constexpr,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BOUNDED: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    read = row
    if TAKES:
        read = tl.load(more + row, mask=row < rows, other=0)
    v = tl.load(x + read[:, None] * apart + column[None, :], mask=there, other=0.0)
    if EACH:  # entries per gate
        gate = tl.load(more + row[:, None] * more_apart + (column // EACH)[None, :], mask=there, other=0.0)
        v = v * activated(gate, ACTIVATION)
    else:
        v = activated(v, ACTIVATION)
    if BOUNDED:
        v = tl.where(v > bound, bound, tl.where(v < -bound, -bound, v))
    put(to + row[:, None] * to_apart + column[None, :], v, there, factor, ADDS, SCALES)


@triton.jit(do_not_specialize=("rows",))
def _xielu(x, to, rows, width, rise, fall, slope, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    at = row[:, None] * width + column[None, :]
    v = tl.load(x + at, mask=there, other=0.0)
    half = tangent(tl.where(v > least, least, v) * 0.5)
    less_one = tl.div_rn(half + half, 1.0 - half)
    straight = v * slope
    below = tl.fma(less_one - v, tl.zeros_like(v) + fall, straight)
    tl.store(to + at, tl.where(v > 0.0, tl.fma(v * rise, v, straight), below), mask=there)


@triton.jit(do_not_specialize=("rows",))
def _mix(
    x,
    coefficients,
    to,
    rows,
    size,
    factor,
    VECTORS: tl.constexpr,
    SUMS: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, there = part_of(rows, size, ROWS, COLUMNS)
    row, column = row[:, None], column[None, :]
    for n in tl.static_range(SUMS):
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.static_range(VECTORS):
            v = tl.load(x + (row * VECTORS + k) * size + column, mask=there, other=0.0)
            coefficient = tl.load(coefficients + (row * SUMS + n) * VECTORS + k, mask=row < rows, other=0.0)
            found = tl.fma(v, tl.broadcast_to(coefficient, (ROWS, COLUMNS)), found)
        put(to + (row * SUMS + n) * size + column, found, there, factor, ADDS, SCALES)


@triton.jit(do_not_specialize=("rows",))
def _combine(
    x,
    routes,
    to,
    rows,
    width,
    factor,
    PICKS: tl.constexpr,
    WEIGHED: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for pick in range(PICKS):
        weight = tl.full((ROWS,), 1.0, tl.float32)
        if WEIGHED:
            weight = tl.load(routes + row * (2 * PICKS) + 2 * pick + 1, mask=row < rows, other=0.0)
        at = x + (row[:, None] * PICKS + pick) * width + column[None, :]
        sums = tl.fma(tl.load(at, mask=there, other=0.0), weight[:, None], sums)
    put(to + row[:, None] * width + column[None, :], sums, there, factor, ADDS, SCALES)


@triton.jit(do_not_specialize=("rows",))
def _weigh(x, routes, to, rows, width, PICKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    v = tl.load(x + row[:, None] * width + column[None, :], mask=there, other=0.0)
    for pick in range(PICKS):
        weight = tl.load(routes + row * (2 * PICKS) + 2 * pick + 1, mask=row < rows, other=0.0)
        tl.store(to + (row[:, None] * PICKS + pick) * width + column[None, :], v * weight[:, None], mask=there)


@triton.jit(do_not_specialize=("rows",))
def _watch(x, broken, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, there = part_of(rows, width, ROWS, COLUMNS)
    v = tl.load(x + row[:, None] * width + column[None, :], mask=there, other=0.0)
    infinite = there & ((v - v) != 0.0)
    tl.store(broken + row, tl.full((ROWS,), 1, tl.int8), mask=tl.max(infinite.to(tl.int32), 1) > 0)


@triton.jit
def _kept(x, most, IN_16: tl.constexpr):
    """Return the entries that the cache stores for x: within its bounds, rounded if in bf16; NaN becomes 0."""
    x = tl.where(x > most, most, tl.where(x < most * -1.0, most * -1.0, tl.where(x == x, x, 0.0)))
    if IN_16:
        x = nearest_bf16(x)
    return x


@triton.jit(do_not_specialize=("rows",))
def _rotate(
    qkv,
    positions,
    places,
    cosines,
    sines,
    factors,
    keys,
    kept,
    broken,
    rows,
    wide,
    most,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FACTORS: tl.constexpr,
    LAST: tl.constexpr,
    IN_16: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Process a head of some rows of `wide` entries: rotate queries and keys in place, store keys and values."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    row_there, at = (row < rows)[:, None], tl.arange(0, WIDTH)[None, :]
    place = tl.load(places + row, mask=row < rows, other=0)[:, None]
    page, inside = place // _PAGE, place % _PAGE
    if head < HEADS + KV_HEADS:
        there = row_there & (at < SIZE)
        of = qkv + row[:, None] * wide + head * SIZE + at
        x = tl.load(of, mask=there, other=0.0)
        position = tl.load(positions + row, mask=row < rows, other=0)[:, None]
        if TURNED:
            # Entry `at` is the first or the second of its pair.
            if INTERLEAVED:
                second, pair = at % 2, at // 2
                distance = 1 - 2 * second
            else:
                second, pair = at // (TURNED // 2), at % (TURNED // 2)
                distance = TURNED // 2 * (1 - 2 * second)
            turns = there & (at < TURNED)
            other = tl.load(of + distance, mask=turns, other=0.0)
            cosine = tl.load(cosines + position * (TURNED // 2) + pair, mask=turns, other=0.0)
            sine = tl.load(sines + position * (TURNED // 2) + pair, mask=turns, other=0.0)
            product = other * sine
            x = tl.where(turns, tl.fma(x, cosine, tl.where(second == 0, product * -1.0, product)), x)
            tl.debug_barrier()  # both of a pair are read before one is written
            tl.store(of, x, mask=turns)
        if FACTORS and head < HEADS:
            x = x * tl.load(factors + position, mask=row_there, other=1.0)
            tl.store(of, x, mask=there)
        if head >= HEADS:
            to = keys + ((page * KV_HEADS + head - HEADS) * SIZE + at) * _PAGE + inside
            tl.store(to, _kept(x, most, IN_16), mask=there)
            if LAST:
                infinite = there & ((x - x) != 0.0)
                tl.store(broken + row, tl.full((ROWS,), 1, tl.int8), mask=tl.max(infinite.to(tl.int32), 1) > 0)
    else:
        number = head - HEADS - KV_HEADS
        there = row_there & (at < VALUES)
        of = qkv + row[:, None] * wide + (HEADS + KV_HEADS) * SIZE + number * VALUES + at
        v = tl.load(of, mask=there, other=0.0)
        tl.store(kept + ((page * KV_HEADS + number) * _PAGE + inside) * VALUES + at, _kept(v, most, IN_16), mask=there)


def embed(
    table: torch.Tensor,
    ids: torch.Tensor,
    offset: int,
    into: Into,
    to: torch.Tensor,
    panel: int = 1,
    together: int = 1,
    known: int = 0,
) -> None:
    """Compute `steps.Embed`: rows of a table [entries, width], for ids + offset (int64 [rows]), into [rows, width].

    For `steps.EmbedColumn` in floats, the table is [panels, width / together, panel * together]. Ids from `known` on
    get row 0, if `known` is not 0. Results are float32.
    """
    rows, columns, grid = tiles(len(to), to.shape[1], _ROWS, _COLUMNS)
    _embed[grid](
        *(table, ids, to, len(to), offset, to.shape[1], float(into.factor), panel, together, known),
        *(into.add, into.factor != 1, rows, columns),
        **OPTIONS,
    )


def xielu(step: Xielu, x: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Xielu` of x, float32 [rows, width], into a tensor of the same shape, which may be x."""
    rows, columns, grid = tiles(len(to), to.shape[1], _ROWS, _COLUMNS)
    numbers = float(step.rise), float(step.fall), float(step.slope), float(step.least)
    _xielu[grid](x, to, len(to), to.shape[1], *numbers, rows, columns, **OPTIONS)


def copy(
    x: torch.Tensor,
    into: Into,
    to: torch.Tensor,
    *,
    take: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    function: Activation = Activation.NONE,
    bound: float = 0.0,
) -> None:
    """Compute `steps.Copy`, `Take`, `Gate` or `Activate`: rows of x into `to`, float32 [rows, width].

    Args:
        x: float32 [rows, width], perhaps part of longer rows.
        into: the buffer of `to`.
        to: written to; perhaps part of longer rows, too.
        take: int64 [n], the rows of x to use; None for all.
        gates: float32 [rows, n], by whose function rows are multiplied, each for width / n entries; perhaps one row for
            all; None for none.
        function: of each entry, or of the gates.
        bound: see `steps.Copy`.
    """
    rows, columns, grid = tiles(len(to), to.shape[1], _ROWS, _COLUMNS)
    more = next(t for t in (gates, take, x) if t is not None)
    _copy[grid](
        *(
            x,
            more,
            to,
            len(to),
            to.shape[1],
            x.stride(0),
            more.stride(0),
            to.stride(0),
            float(into.factor),
            float(bound),
        ),
        take is not None,
        *(0 if gates is None else to.shape[1] // gates.shape[1], int(function), bool(bound)),
        *(into.add, into.factor != 1, rows, columns),
        **OPTIONS,
    )


def mix(step: Mix, x: torch.Tensor, coefficients: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `steps.Mix`: [rows, vectors * size] by [rows, sums * vectors] into [rows, sums * size], all float32."""
    x = x.clone() if step.x == step.to.buffer else x  # a row is read completely before any of it is written
    rows, columns, grid = tiles(len(to), step.size, _ROWS, _COLUMNS)
    _mix[grid](
        *(x, coefficients, to, len(to), step.size, float(step.to.factor)),
        *(x.shape[1] // step.size, to.shape[1] // step.size, step.to.add, step.to.factor != 1, rows, columns),
        **OPTIONS,
    )


def weigh(x: torch.Tensor, routes: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `Weigh`: [rows, width] by routes [rows, 2 * picks] into [rows, picks * width], all float32."""
    rows, columns, grid = tiles(len(x), x.shape[1], _ROWS, _COLUMNS)
    _weigh[grid](x, routes, to, *x.shape, routes.shape[1] // 2, rows, columns, **OPTIONS)


def watch(x: torch.Tensor, broken: torch.Tensor) -> None:
    """Compute `Watch` for float32 [rows, width]: set `broken`, int8 [rows], to 1 where a row is not finite."""
    rows, columns, grid = tiles(len(x), x.shape[1], _ROWS, _COLUMNS)
    _watch[grid](x, broken, *x.shape, rows, columns, **OPTIONS)


def combine(x: torch.Tensor, routes: torch.Tensor, into: Into, to: torch.Tensor, *, weighed: bool) -> None:
    """Compute `Combine`: [rows, picks * width] by routes [rows, 2 * picks] into [rows, width], all float32."""
    rows, columns, grid = tiles(len(to), to.shape[1], _ROWS, _COLUMNS)
    _combine[grid](
        *(x, routes, to, len(to), to.shape[1], float(into.factor), routes.shape[1] // 2, weighed),
        *(into.add, into.factor != 1, rows, columns),
        **OPTIONS,
    )


def rotate(
    step: Rotate, qkv: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, broken: torch.Tensor
) -> None:
    """Compute `steps.Rotate` for float32 [rows, width]; set `broken`, int8 [rows], to 1 where the last layer's keys are
    not finite."""
    cache, rows = step.cache, tile(len(qkv), _ROWS)
    tables = (qkv if t is None else t for t in (step.cosines, step.sines, step.factors))
    values = 0 if cache.kept is None else cache.values
    heads, kept = cache.heads, cache.keys if cache.kept is None else cache.kept
    if qkv.shape[1] != heads * cache.size:
        heads += cache.kv_heads * (1 + bool(values))
    _rotate[(triton.cdiv(len(qkv), rows), heads)](
        *(qkv, positions, places, *tables, cache.keys, kept, broken, *qkv.shape, most("float32")),
        *(cache.heads, cache.kv_heads, cache.size, values, step.turned, step.interleaved),
        *(step.factors is not None, step.last, cache.storage == Storage.BFLOAT),
        *(rows, above(max(cache.size, values))),
        num_warps=1,
        **OPTIONS,
    )
