"""Layers that keep a state per sequence: the short convolution, the gated delta rule, state spaces.

Promise: the result of a row depends only on its own sequence. A program has some channels of one sequence, or some
columns of a head's state; it processes rows in the order of their positions, as docs/numerics.md defines, and no other
program reads or writes what it stores. Spans without rows are skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import activated, exponential, logarithm, sigmoid
from detgen.kernels.triton.launching import OPTIONS, above, tile
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace

_ROWS, _CHANNELS = 16, 64  # most rows and channels of a tile
_VALUES = 32  # columns of a state per program, one per thread: a thread reads only what it wrote
_MOST = 1 << 26  # bytes of the states of sequences in progress at once


@triton.jit
def _span(spans, number):
    """Return slot, first row, its position, rows, the state's position, and the end of certain rows; int64 each."""
    at = spans + 6 * number
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    kept,
    spans,
    to,
    width,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    slot, first, start, tokens, _, _ = _span(spans, tl.program_id(0))
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    there = channel < width
    ring = kept + slot * RING * width + channel
    for begin in range(0, tokens, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        y = tl.zeros((ROWS, CHANNELS), tl.float32)
        for tap in tl.static_range(TAPS):
            seen = row - (TAPS - 1 - tap)
            position = start + seen
            inside = there & (row < tokens)
            own = tl.load(x + (first + seen) * width + channel, mask=inside & (seen >= 0), other=0.0)
            before = inside & (seen < 0) & (position >= 0)
            v = tl.where(seen >= 0, own, tl.load(ring + position % RING * width, mask=before, other=0.0))
            y = tl.fma(tl.load(weight + tap * width + channel, mask=there, other=0.0), v, y)
        if BIASED:
            y = y + tl.load(bias + channel, mask=there, other=0.0)
        tl.store(to + (first + row) * width + channel, activated(y, ACTIVATION), mask=there & (row < tokens))
    tl.debug_barrier()  # the kept rows have been read
    for begin in range(tl.maximum(tokens - RING, 0), tokens, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        inside = there & (row < tokens)
        v = tl.load(x + (first + row) * width + channel, mask=inside, other=0.0)
        tl.store(ring + (start + row) % RING * width, v, mask=inside)


@triton.jit
def _softplus(x):
    """Return log(1 + e^x); the logarithm is taken in float64."""
    e = exponential(tl.abs(x) * -1.0).to(tl.float64) + 1.0
    return tl.where(x < 0.0, 0.0, x) + logarithm(tl.where(e == e, e, 1.0)).to(tl.float32)


@triton.jit
def _corrected(state, key, value, decay, strength, apart, there, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Advance the state of a delta rule, whose entries are `apart`, by a row."""
    m = tl.zeros((VALUES,), tl.float32)
    for i in range(SIZE):
        s = tl.load(state + i * apart, mask=there, other=0.0) * decay
        tl.store(state + i * apart, s, mask=there)
        m = tl.fma(s, tl.load(key + i), m)
    wrong = (value - m) * strength
    for i in range(SIZE):
        s = tl.fma(tl.load(key + i), wrong, tl.load(state + i * apart, mask=there, other=0.0))
        tl.store(state + i * apart, s, mask=there)


@triton.jit
def _added(state, key, value, decay, strength, apart, there, SIZE: tl.constexpr):
    """Advance the state of a state space by a row."""
    u = value * strength
    for i in range(SIZE):
        s = tl.fma(tl.load(key + i), u, tl.load(state + i * apart, mask=there, other=0.0) * decay)
        tl.store(state + i * apart, s, mask=there)


@triton.jit
def _copied(to, x, there, RUNS: tl.constexpr, APART: tl.constexpr):
    for i in range(RUNS):
        tl.store(to + i * APART, tl.load(x + i * APART, mask=there, other=0.0), mask=there)


@triton.jit
def _recur(
    qkv,
    decays,
    strengths,
    rates,
    biases,
    skips,
    states,
    kept,
    spans,
    working,
    to,
    count,
    least,
    most,
    SPACE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    VALUES: tl.constexpr,
):
    head, block = tl.program_id(1), tl.program_id(2)
    keys: tl.constexpr = KEY_HEADS * SIZE
    wide: tl.constexpr = keys + HEADS * WIDTH + 2 * HEADS  # width of what is kept of a row
    own = head // (HEADS // KEY_HEADS) * SIZE
    column = block * VALUES + tl.arange(0, VALUES)
    there = column < WIDTH
    state = working + (tl.program_id(0).to(tl.int64) * HEADS + head) * (SIZE * WIDTH) + column
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        slot, first, start, tokens, base, certain = _span(spans, number)
        stored = states + (slot * HEADS + head) * (SIZE * WIDTH) + column
        if tokens > 0:
            for i in range(SIZE):
                s = tl.load(stored + i * WIDTH, mask=there, other=0.0)
                tl.store(state + i * WIDTH, tl.where(base > 0, s, 0.0), mask=there)
            for position in range(base, start):
                of = kept + (slot * RING + position % RING) * wide
                value = tl.load(of + keys + head * WIDTH + column, mask=there, other=0.0)
                decay = tl.load(of + keys + HEADS * WIDTH + head)
                strength = tl.load(of + keys + HEADS * WIDTH + HEADS + head)
                if SPACE:
                    _added(state, of + own, value, decay, strength, WIDTH, there, SIZE)
                else:
                    _corrected(state, of + own, value, decay, strength, WIDTH, there, SIZE, VALUES)
            if certain == start:
                _copied(stored, state, there, SIZE, WIDTH)
            for row in range(first, first + tokens):
                position = start + row - first
                query = qkv + row * (2 * keys + HEADS * WIDTH) + own
                value = tl.load(query - own + 2 * keys + head * WIDTH + column, mask=there, other=0.0)
                step = _softplus(tl.load(decays + row * HEADS + head) + bias)
                if SPACE:
                    step = tl.where(step < least, least, tl.where(step > most, most, step))
                    strength = step
                else:
                    strength = sigmoid(tl.load(strengths + row * HEADS + head))
                decay = exponential(step * rate)
                if SPACE:
                    _added(state, query + keys, value, decay, strength, WIDTH, there, SIZE)
                else:
                    _corrected(state, query + keys, value, decay, strength, WIDTH, there, SIZE, VALUES)
                y = tl.zeros((VALUES,), tl.float32)
                for i in range(SIZE):
                    y = tl.fma(tl.load(state + i * WIDTH, mask=there, other=0.0), tl.load(query + i), y)
                if SPACE:
                    y = tl.fma(value, tl.load(skips + head), y)
                tl.store(to + row * (HEADS * WIDTH) + head * WIDTH + column, y, mask=there)
                if position + 1 == certain:
                    _copied(stored, state, there, SIZE, WIDTH)
                if position >= certain:
                    of = kept + (slot * RING + position % RING) * wide
                    tl.store(of + keys + head * WIDTH + column, value, mask=there)
                    if block == 0:
                        tl.store(of + keys + HEADS * WIDTH + head, decay)
                        tl.store(of + keys + HEADS * WIDTH + HEADS + head, strength)
                        if head % (HEADS // KEY_HEADS) == 0:
                            for i in range(SIZE):
                                tl.store(of + own + i, tl.load(query + keys + i))


@triton.jit
def _scanned(state, key, value, step, rates, apart, there, SIZE: tl.constexpr):
    """Advance the state of a selective scan by a row."""
    u = value * step
    for i in range(SIZE):
        decay = exponential(step * tl.load(rates + i * apart, mask=there, other=0.0))
        s = tl.fma(tl.load(key + i), u, tl.load(state + i * apart, mask=there, other=0.0) * decay)
        tl.store(state + i * apart, s, mask=there)


@triton.jit
def _scan(
    x,
    times,
    kq,
    rates,
    biases,
    skips,
    states,
    kept,
    spans,
    working,
    to,
    count,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    VALUES: tl.constexpr,
):
    wide: tl.constexpr = SIZE + 2 * WIDTH  # width of what is kept of a row
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    there = column < WIDTH
    state = working + tl.program_id(0).to(tl.int64) * (SIZE * WIDTH) + column
    rate = rates + column
    bias, skip = tl.load(biases + column, mask=there, other=0.0), tl.load(skips + column, mask=there, other=0.0)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        slot, first, start, tokens, base, certain = _span(spans, number)
        stored = states + slot * (SIZE * WIDTH) + column
        if tokens > 0:
            for i in range(SIZE):
                s = tl.load(stored + i * WIDTH, mask=there, other=0.0)
                tl.store(state + i * WIDTH, tl.where(base > 0, s, 0.0), mask=there)
            for position in range(base, start):
                of = kept + (slot * RING + position % RING) * wide
                value = tl.load(of + SIZE + column, mask=there, other=0.0)
                step = tl.load(of + SIZE + WIDTH + column, mask=there, other=0.0)
                _scanned(state, of, value, step, rate, WIDTH, there, SIZE)
            if certain == start:
                _copied(stored, state, there, SIZE, WIDTH)
            for row in range(first, first + tokens):
                position = start + row - first
                key = kq + row * (2 * SIZE)
                value = tl.load(x + row * WIDTH + column, mask=there, other=0.0)
                step = _softplus(tl.load(times + row * WIDTH + column, mask=there, other=0.0) + bias)
                _scanned(state, key, value, step, rate, WIDTH, there, SIZE)
                y = tl.zeros((VALUES,), tl.float32)
                for i in range(SIZE):
                    y = tl.fma(tl.load(state + i * WIDTH, mask=there, other=0.0), tl.load(key + SIZE + i), y)
                tl.store(to + row * WIDTH + column, tl.fma(value, skip, y), mask=there)
                if position + 1 == certain:
                    _copied(stored, state, there, SIZE, WIDTH)
                if position >= certain:
                    of = kept + (slot * RING + position % RING) * wide
                    tl.store(of + SIZE + column, value, mask=there)
                    tl.store(of + SIZE + WIDTH + column, step, mask=there)
                    if tl.program_id(1) == 0:
                        for i in range(SIZE):
                            tl.store(of + i, tl.load(key + i))


def convolve(step: Convolve, x: torch.Tensor, spans: torch.Tensor, to: torch.Tensor) -> None:
    """Compute `states.Convolve` for all rows of a pass.

    Args:
        step: the step.
        x: float32 [rows, channels].
        spans: see `Rows`; spans without rows are skipped.
        to: float32 [rows, channels]; takes the results. Rows of no span are left unchanged.
    """
    width = x.shape[1]
    rows, channels = tile(_ROWS, _ROWS), tile(width, _CHANNELS)
    _convolve[(len(spans), triton.cdiv(width, channels))](
        *(x, step.weight, x if step.bias is None else step.bias, step.kept, spans, to, width),
        *(step.taps, step.ring, int(step.activation), step.bias is not None, rows, channels),
        **OPTIONS,
    )


def recur(
    step: DeltaRule | StateSpace,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor | None,
    spans: torch.Tensor,
    to: torch.Tensor,
) -> None:
    """Compute `states.DeltaRule` or `states.StateSpace` for all rows of a pass.

    Args:
        step: the step.
        qkv: float32 [rows, width].
        decay: float32 [rows, heads].
        strength: float32 [rows, heads], of a delta rule; None for a state space.
        spans: as for `convolve`.
        to: float32 [rows, heads * values]; as for `convolve`.
    """
    heads, size, width = step.heads, step.size, step.values
    working, values = _working(qkv, len(spans), heads, size, width)
    side = len(working)
    skip, least, most = (step.skip, step.least, step.most) if isinstance(step, StateSpace) else (qkv, 0.0, 0.0)
    _recur[(side, heads, triton.cdiv(width, values))](
        *(qkv, decay, qkv if strength is None else strength, step.rates, step.bias, skip, step.state, step.kept),
        *(spans, working, to, len(spans), float(least), float(most), isinstance(step, StateSpace)),
        *(heads, step.key_heads, size, width, step.ring, values),
        num_warps=1,
        **OPTIONS,
    )


def scan(
    step: SelectiveScan,
    x: torch.Tensor,
    times: torch.Tensor,
    kq: torch.Tensor,
    spans: torch.Tensor,
    to: torch.Tensor,
) -> None:
    """Compute `states.SelectiveScan` for all rows of a pass.

    Args:
        step: the step.
        x: float32 [rows, values].
        times: float32 [rows, values].
        kq: float32 [rows, 2 * size].
        spans: as for `convolve`.
        to: float32 [rows, values]; as for `convolve`.
    """
    working, values = _working(x, len(spans), 1, step.size, step.values)
    _scan[(len(working), triton.cdiv(step.values, values))](
        *(x, times, kq, step.rates, step.bias, step.skip, step.state, step.kept, spans, working, to, len(spans)),
        *(step.size, step.values, step.ring, values),
        num_warps=1,
        **OPTIONS,
    )


def _working(like: torch.Tensor, spans: int, heads: int, size: int, width: int) -> tuple[torch.Tensor, int]:
    """Return room for the states of sequences in progress at once, and the columns of a program."""
    side = min(spans, max(_MOST // (4 * heads * size * width), 1))
    return like.new_empty(side, heads, size, width), above(tile(width, _VALUES), _VALUES)
