"""Sums and functions of the arithmetic `detgen-2` in plain PyTorch, in the order that docs/numerics.md states.

All tensors are float32 unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from detgen.program import fdlibm
from detgen.program.operands import GROUP, LEAST, LOGIT_BLOCK, PART_INPUTS, SECTION_PARTS, SUM_BLOCK, Activation
from detgen.program.storage import Rule, bf16
from detgen.program.tensor_cores import added

LANES = 16
_SECTION = SECTION_PARTS * PART_INPUTS


def number(x: float) -> torch.Tensor:
    """Return a constant rounded to float32 before it is used."""
    return torch.tensor(x, dtype=torch.float32)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c with a single rounding, float32; arguments broadcast.

    The product is exact in float64. Rounding the sum twice gives the same result as rounding it once, unless the
    float64 sum lies halfway between two float32 numbers; it is then rounded to odd first (Boldo and Melquiond,
    Emulation of FMA and Correctly Rounded Sums, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    bits = total.view(torch.int64)
    if not (bits & 0xFFFFFFF == 0).any():
        return total.float()
    virtual = total - product
    rest = (product - (total - virtual)) + (addend - virtual)  # Knuth's two-sum: what the rounding left out
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    inexact = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    rounded: torch.Tensor = torch.where(inexact, bits + away, bits).view(torch.float64).float()
    return rounded


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., inputs], [..., inputs, outputs] -> [..., outputs]: chains of parts of the inputs, in sections."""
    x, weight = x.double(), weight.double()

    def chain(first: int, end: int) -> torch.Tensor:
        part = torch.zeros(())
        for i in range(first, end):
            part = fma(weight[..., i, :], x[..., i, None], part)
        return part

    return _by_parts(x.shape[-1], chain)


def _by_parts(inputs: int, part: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Sum `part(first, end)` over the parts of the inputs, in sections."""
    parts = [part(first, min(first + PART_INPUTS, inputs)) for first in range(0, inputs, PART_INPUTS)]
    sections = [in_order(parts[first : first + SECTION_PARTS]) for first in range(0, len(parts), SECTION_PARTS)]
    return in_order(sections)


def pair_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Like `linear`, with inputs rounded to bf16; the odd input of each pair comes first."""
    order = torch.arange(x.shape[-1]) ^ 1
    return linear(bf16(x)[..., order], weight[..., order, :])


def core_linear(x: torch.Tensor, weight: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Like `linear`, with inputs rounded to bf16; parts are added up as tensor cores do."""
    x, none = bf16(x), torch.zeros(())
    return _by_parts(x.shape[-1], lambda i, end: added(x[..., i:end], weight[..., i:end, :], none, rule))


def whole_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., inputs] -> whole numbers from -127 to 127, [..., groups, GROUP], and their scales, [..., groups]."""
    groups: torch.Tensor = x.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1)  # NaN if any entry is
    small = most < LEAST
    whole = (groups * (number(127) / most)[..., None]).round()
    whole = whole.where((most < torch.inf)[..., None] & ~small[..., None], 0.0)
    return whole, (most / 127).where(most < torch.inf, torch.nan).where(~small, 0.0)


def whole_linear(
    x: torch.Tensor, whole: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., inputs], whole numbers [..., inputs, outputs], scales and minima [..., n, outputs] -> [..., outputs].

    The sums of groups are exact and added up in sections; n is the number of groups, or twice that.
    """
    inputs, own = whole_inputs(x)
    groups, halves = own.shape[-1], scales.shape[-2] // own.shape[-1]
    entries = inputs.unflatten(-1, (halves, -1)).double()[..., None]  # [..., groups, halves, entries, 1]
    products = (entries * whole.double().unflatten(-2, (groups, halves, -1))).sum(-2).float()
    scales, totals = scales.unflatten(-2, (groups, halves)), entries.sum(-2).float()
    sections = []
    for first in range(0, groups, _SECTION // GROUP):
        section = torch.zeros(())
        for g in range(first, min(first + _SECTION // GROUP, groups)):
            scaled = products[..., g, 0, :] * scales[..., g, 0, :]
            if halves == 2:
                scaled = fma(products[..., g, 1, :], scales[..., g, 1, :], scaled)
            if minima is not None:
                for half, minimum in enumerate(minima.unflatten(-2, (groups, halves))[..., g, :, :].unbind(-2)):
                    scaled = fma(totals[..., g, half, :], minimum, scaled)
            section = fma(scaled, own[..., g, None], section)
        sections.append(section)
    return in_order(sections)


def in_order(x: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up tensors in order, starting with the first."""
    out = x[0]
    for each in x[1:]:
        out = out + each
    return out


def lanes_of(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., whole vectors, LANES], padded with zeros."""
    lanes: torch.Tensor = F.pad(x, (0, -x.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    return lanes


def fold(lanes: torch.Tensor) -> torch.Tensor:
    """Sum sixteen lanes, [..., LANES] -> [...]: lanes eight apart are added first, then four, two and one."""
    step = LANES // 2
    while step:
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
        step //= 2
    return lanes[..., 0]


def by_lanes(x: torch.Tensor) -> torch.Tensor:
    """Sum the last axis, [..., n] -> [...], in sixteen lanes, which are then folded."""
    lanes = x.new_zeros(*x.shape[:-1], LANES)
    for v in lanes_of(x).unbind(-2):
        lanes = lanes + v
    return fold(lanes)


def in_blocks(x: torch.Tensor, size: int, value: float = 0.0) -> torch.Tensor:
    """[..., n] -> [..., blocks, size], padded with `value`."""
    blocks: torch.Tensor = F.pad(x, (0, -x.shape[-1] % size), value=value).unflatten(-1, (-1, size))
    return blocks


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum the last axis, [..., n] -> [...]: each block by lanes, then the sums of the blocks by lanes."""
    return by_lanes(by_lanes(in_blocks(x, SUM_BLOCK)))


def _less_mean(x: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the last axis."""
    return x - (total(x) / x.shape[-1])[..., None]


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean square of the last axis, [..., n] -> [...]; added up as in `total`."""
    blocks = lanes_of(in_blocks(x, SUM_BLOCK))  # [..., blocks, vectors, LANES]
    squares = x.new_zeros(*blocks.shape[:-2], LANES)
    for v in blocks.unbind(-2):
        squares = fma(v, v, squares)
    return by_lanes(fold(squares)) / x.shape[-1]


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    centred: bool,
    least: float = 0.0,
) -> torch.Tensor:
    """Root-mean-square norm, or layer norm if centred, over the last axis of [..., n]."""
    if centred:
        x = _less_mean(x)
    scale = 1 / root(_mean_square(x).clamp(min=number(least)) + number(epsilon))
    out = x * scale[..., None]
    if weight is None:
        return out
    return out * weight if bias is None else fma(out, weight, bias)


def gaussian_top_k(x: torch.Tensor, deviations: float) -> torch.Tensor:
    """max(0, x - mean - deviations * standard deviation) over the last axis."""
    x = _less_mean(x)
    return relu(x - (root(_mean_square(x)) * number(deviations))[..., None])


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """Horner's scheme, the highest power first."""
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma(p, x, number(c))
    return p


def exponential(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88; 0 below -87."""
    magic = number(12582912.0)
    inside = torch.where(x < -87, -87.0, x)
    n = fma(inside, number(1.44269504), magic) - magic
    r = fma(n, number(-0.693359375), inside)
    r = fma(n, number(2.12194440e-4), r)
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


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x); the logarithm is taken in float64."""
    found = 1 + exponential(-x.abs()).double()
    log = torch.from_numpy(fdlibm.logarithm(found.nan_to_num(1.0).numpy())).float()
    return x.clamp(min=0) + log


def tangent(x: torch.Tensor) -> torch.Tensor:
    """tanh x."""
    square = x * x
    p = _polynomial(
        (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1), square
    )
    p = fma(p * square, x, x)
    e = exponential(x.abs() * -2)
    return torch.where(x.abs() > 0.625, torch.copysign((1 - e) / (1 + e), x), p)


def xielu(x: torch.Tensor, rise: float, fall: float, slope: float, least: float) -> torch.Tensor:
    """xIELU of each entry; see `steps.Xielu`."""
    half = tangent(torch.where(x > number(least), number(least), x) * 0.5)
    less_one = (half + half) / (1 - half)  # e^x - 1, exact near 0
    straight = x * number(slope)
    return torch.where(
        x > 0, fma(x * number(rise), x, straight), fma(less_one - x, number(fall).expand_as(x), straight)
    )


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
    inner = fma(x * x * x, number(0.044715), x) * number(0.7978845608)
    return (0.5 * x) * (1 + tangent(inner))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU."""
    return (0.5 * x) * (1 + error_function(x * number(0.7071067812)))


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return torch.where(x > 0, x, torch.where(x < 0, 0.0, x))


def root(x: torch.Tensor) -> torch.Tensor:
    """Square root, correctly rounded: torch's may be off in float32, so it is taken in float64."""
    return x.double().sqrt().float()


def capped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(x / softcap); a softcap of 0 means none."""
    return tangent(x / number(softcap)) * number(softcap) if softcap else x


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Probabilities, [..., n] -> [..., n]."""
    powers = exponential(x - x.amax(-1, keepdim=True))
    return powers / total(powers)[..., None]


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., blocks, LOGIT_BLOCK], padded with -inf."""
    return in_blocks(x, LOGIT_BLOCK, -torch.inf)


def block_totals(blocks: torch.Tensor) -> torch.Tensor:
    """Sum e^(x - largest entry) in each block, [..., blocks, LOGIT_BLOCK] -> [..., blocks]."""
    tops = blocks.amax(-1, keepdim=True)
    return by_lanes(exponential(blocks - tops.where(tops > -torch.inf, 0.0)))


def log_total(tops: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Logarithm of a row's sum of e^(x - largest entry), [...].

    Args:
        tops: [..., blocks], the largest entry of each block.
        totals: [..., blocks], as `block_totals` gives them.
    """
    found = by_lanes(totals * exponential(tops - tops.amax(-1, keepdim=True)))
    sound = (found > 0) & (found < torch.inf)
    log = torch.from_numpy(fdlibm.logarithm(found.where(sound, 1.0).double().numpy())).float()
    return log.where(sound, found - found)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, [..., n] -> [..., n]."""
    blocks = by_blocks(x)
    tops = blocks.amax(-1)
    out: torch.Tensor = x - tops.amax(-1, keepdim=True) - log_total(tops, block_totals(blocks))[..., None]
    return out


FUNCTIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: silu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.GELU: gelu,
    Activation.RELU: relu,
    Activation.RELU_SQUARED: lambda x: relu(x) * relu(x),
    Activation.SIGMOID: sigmoid,
    Activation.TANH: tangent,
    Activation.ROOT: root,
    Activation.RECIPROCAL_ROOT: lambda x: 1 / root(x),
}
