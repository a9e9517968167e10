"""The arithmetic `detgen-1` in plain PyTorch: slow, and the same bits as the C files beside it.

What each function computes, and in which order, is what docs/numerics.md states. All tensors are float32 unless it is
said.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from detgen.kernels import exact
from detgen.program.steps import LOGIT_BLOCK, PART_INPUTS

LANES = 16


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c with one rounding, float32, by broadcasting.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it to float32 is as good as
    rounding once (Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums, 2008).
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    virtual = total - product
    rest = (product - (total - virtual)) + (addend - virtual)  # Knuth's two-sum: what the rounding left out
    bits = total.view(torch.int64)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    inexact = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    rounded: torch.Tensor = torch.where(inexact, bits + away, bits).view(torch.float64).float()
    return rounded


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, inputs], [outputs, inputs] in float32 or 16 bits, [outputs] -> [rows, outputs]."""
    out: torch.Tensor | None = None
    for first in range(0, x.shape[1], PART_INPUTS):
        part = x.new_zeros(x.shape[0], weight.shape[0])
        for i in range(first, min(first + PART_INPUTS, x.shape[1])):
            part = fma(weight[:, i].float(), x[:, i, None], part)
        out = part if out is None else out + part
    assert out is not None
    return out if bias is None else out + bias


def lanes_of(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., whole vectors, LANES], zeros behind the last entry."""
    padded = F.pad(x, (0, -x.shape[-1] % LANES))
    return padded.view(*x.shape[:-1], -1, LANES)


def fold(lanes: torch.Tensor) -> torch.Tensor:
    """The sum of sixteen lanes, [..., LANES] -> [...]: those eight apart, then four, two and one."""
    step = LANES // 2
    while step:
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
        step //= 2
    return lanes[..., 0]


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    centred: bool,
) -> torch.Tensor:
    """A root-mean-square norm, or a layer norm if it is centred, of the last axis of [..., n]."""
    n = x.shape[-1]
    if centred:
        total = x.new_zeros(*x.shape[:-1], LANES)
        for v in lanes_of(x).unbind(-2):
            total = total + v
        x = x - (fold(total) / n)[..., None]
    squares = x.new_zeros(*x.shape[:-1], LANES)
    for v in lanes_of(x).unbind(-2):
        squares = fma(v, v, squares)
    scale = 1 / root(fold(squares) / n + torch.tensor(epsilon))
    out = x * scale[..., None]
    if weight is None:
        return out
    return out * weight if bias is None else fma(out, weight, bias)


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """Horner's scheme, the highest power first."""
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma(p, x, torch.tensor(c))
    return p


def exponential(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88; 0 below -87."""
    magic = torch.tensor(12582912.0)
    inside = torch.where(x < -87, -87.0, x)
    n = fma(inside, torch.tensor(1.44269504), magic) - magic
    r = fma(n, torch.tensor(-0.693359375), inside)
    r = fma(n, torch.tensor(2.12194440e-4), r)
    p = _polynomial(
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
        r,
    )
    p = fma(p * r, r, r) + 1
    power = (n.nan_to_num().to(torch.int32) + 127 << 23).view(torch.float32)
    return torch.where(x < -87, 0.0, p * power)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x)."""
    e = exponential(-x.abs())
    return torch.where(x < 0, e, 1.0) / (1 + e)


def tangent(x: torch.Tensor) -> torch.Tensor:
    """tanh x."""
    square = x * x
    p = _polynomial(
        (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1), square
    )
    p = fma(p * square, x, x)
    e = exponential(x.abs() * -2)
    return torch.where(x.abs() > 0.625, torch.copysign((1 - e) / (1 + e), x), p)


def error_function(x: torch.Tensor) -> torch.Tensor:
    """erf x."""
    small = _polynomial(
        (
            7.853906573e-05,
            -8.010208257e-04,
            5.188329611e-03,
            -2.685381286e-02,
            1.128358543e-01,
            -3.761262596e-01,
            1.283791661e-01,
        ),
        x * x,
    )
    t = torch.where(x.abs() > 4, 4.0, x.abs())
    large = _polynomial(
        (
            -1.413368045e-05,
            3.523305932e-04,
            -3.764653811e-03,
            2.402549610e-02,
            -1.065490916e-01,
            -6.349583268e-01,
            -1.128697157e00,
        ),
        t,
    )
    return torch.where(x.abs() > 1, torch.copysign(1 - exponential(large * t), x), fma(small, x, x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x)."""
    return x * sigmoid(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""
    inner = fma(x * x * x, torch.tensor(0.044715), x) * torch.tensor(0.7978845608)
    return (0.5 * x) * (1 + tangent(inner))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU."""
    return (0.5 * x) * (1 + error_function(x * torch.tensor(0.7071067812)))


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return torch.where(x > 0, x, torch.where(x < 0, 0.0, x))


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root; torch's may be off in float32, and float64's rounds to the right one."""
    return x.double().sqrt().float()


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of the last axis, [..., n] -> [...]."""
    lanes = x.new_zeros(*x.shape[:-1], LANES)
    for v in lanes_of(x).unbind(-2):
        lanes = lanes + v
    return fold(lanes)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Probabilities, [..., n] -> [..., n]."""
    powers = exponential(x - x.amax(-1, keepdim=True))
    return powers / total(powers)[..., None]


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, [..., n] -> [..., n], where entries are finite or -inf."""
    blocks = F.pad(x, (0, -x.shape[-1] % LOGIT_BLOCK), value=-torch.inf).unflatten(-1, (-1, LOGIT_BLOCK))
    tops = blocks.amax(-1)
    shares = exponential(blocks - tops.where(tops > -torch.inf, 0.0)[..., None]).unflatten(-1, (-1, LANES))
    totals = fold(_one_by_one(shares))
    top = tops.amax(-1, keepdim=True)
    parts = lanes_of(totals * exponential(tops - top))
    log = torch.from_numpy(exact.logarithm(fold(_one_by_one(parts)).double().numpy())).float()
    out: torch.Tensor = x - top - log[..., None]
    return out


def _one_by_one(lanes: torch.Tensor) -> torch.Tensor:
    """The sum of [..., n, LANES] over n, in order from 0."""
    total = torch.zeros_like(lanes[..., 0, :])
    for v in lanes.unbind(-2):
        total = total + v
    return total


def route(logits: torch.Tensor, picks: int, *, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of rows, int64 [rows, picks] ascending, and their weights, from logits [rows, experts]."""
    chances = softmax(logits)
    experts = torch.sort(chances, dim=-1, descending=True, stable=True).indices[:, :picks].sort(-1).values
    weights = chances.gather(-1, experts)
    if normalized:
        together = torch.zeros(len(logits))
        for weight in weights.unbind(-1):
            together = together + weight
        weights = weights / together[:, None]
    return experts, weights


def mixture(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum of rows' experts, with SiLU gates.

    Args:
        x: [rows, hidden].
        experts: int64 [rows, picks], ascending.
        weights: [rows, picks].
        up: [experts, 2 * inner, hidden], gates and what they open.
        down: [experts, hidden, inner].
    """
    rows = []
    for row, own, shares in zip(x, experts.tolist(), weights, strict=True):
        total = torch.zeros(down.shape[1])
        for expert, share in zip(own, shares, strict=True):
            gate, opened = linear(row[None], up[expert])[0].chunk(2)
            total = fma(linear((silu(gate) * opened)[None], down[expert])[0], share, total)
        rows.append(total)
    return torch.stack(rows)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Heads [rows, heads, size], their first entries rotated by [rows, turned / 2] cosines and sines."""
    half = cosines.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    c, d = cosines[:, None], sines[:, None]
    first, second = fma(a, c, -(b * d)), fma(b, c, a * d)
    both = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([both, rest], -1)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
) -> torch.Tensor:
    """One query over the keys up to its own position, the last.

    Args:
        q: [size].
        keys: [positions, size].
        values: [positions, value size].
        scale: of the scores.
        window: positions that it sees, its own included; 0 for all.
        softcap: see `AttentionTraits`; 0 for none.
        chunk: likewise.

    Returns:
        [value size].
    """
    count = len(keys)
    low = max(count - window if window else 0, (count - 1) // chunk * chunk if chunk else 0)
    scores = torch.zeros(count)
    for d in range(len(q)):
        scores = fma(keys[:, d], q[d], scores)
    scores = scores * torch.tensor(scale)
    if softcap:
        scores = tangent(scores / torch.tensor(softcap)) * torch.tensor(softcap)
    first = low // LANES * LANES
    seen = torch.where(torch.arange(first, count) < low, -torch.inf, scores[first:])
    weights = exponential(seen - seen.max())
    total = torch.zeros(LANES)
    for v in lanes_of(weights).unbind(-2):
        total = total + v
    out = torch.zeros(values.shape[1])
    for j in range(low, count):
        out = fma(values[j], weights[j - first], out)
    return out / fold(total) + 0.0
