"""Exponential and logarithm in an order of their own: the bits that docs/numerics.md states, whatever GPU and compiler.

Triton's own `exp` is an approximation of the GPU, and its `log` comes from a library; these are made of additions,
products, quotients and fused multiply-adds, each rounded as IEEE 754 says, so that an element depends on its argument
alone, and tests without a GPU see the bits that one gives.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponential(x):
    """e^x of float32 up to 0, and 0 below -87 and of NaN: Cephes' `expf`, as `reference.exponential`."""
    inside = tl.where(x >= -87.0, x, -87.0)
    n = tl.fma(inside, 1.44269504, 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
    r = tl.fma(n, -0.693359375, inside)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p * r, r, r) + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x >= -87.0, p * power, 0.0)


@triton.jit
def logarithm(x):
    """Natural logarithm of float64, positive, finite and not subnormal: fdlibm's `log`, as `exact.logarithm`."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # 0.5 or more, below 1
    small = mantissa < 0.70710678118654752440
    f = tl.where(small, mantissa + mantissa, mantissa) - 1.0
    k = ((bits >> 52) - 1022 - small.to(tl.int64)).to(tl.float64)
    s = f / (f + 2.0)
    z = s * s
    p = z * 1.479819860511658591e-01 + 1.531383769920937332e-01
    p = p * z + 1.818357216161805012e-01
    p = p * z + 2.222219843214978396e-01
    p = p * z + 2.857142874366239149e-01
    p = p * z + 3.999999999940941908e-01
    p = p * z + 6.666666666666735130e-01
    half = f * 0.5 * f
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + z * p) + k * 1.90821492927058770002e-10)) - f)


@triton.jit
def share(x):
    """e^x in units of 2^-44, int64, of float64 up to 0: whole numbers, whose sum is the same in every order.

    A row of fewer than 2^19 entries does not overflow. By a series, whose error is far less than that of the rounding.
    """
    x = tl.maximum(x, -40.0)
    n = (x * 1.4426950408889634 - 0.5).to(tl.int64)  # rounded, as x is at most 0
    whole = n.to(tl.float64)
    r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10
    p = r * (1 / 479001600) + (1 / 39916800)
    p = p * r + (1 / 3628800)
    p = p * r + (1 / 362880)
    p = p * r + (1 / 40320)
    p = p * r + (1 / 5040)
    p = p * r + (1 / 720)
    p = p * r + (1 / 120)
    p = p * r + (1 / 24)
    p = p * r + (1 / 6)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n + 1023 + 44) << 52).to(tl.float64, bitcast=True)
    return (p * power + 0.5).to(tl.int64)


@triton.jit
def fold(lanes, ROWS: tl.constexpr):
    """The sums of sixteen lanes, [ROWS, 16] -> [ROWS]: those eight apart, then four, two and one."""
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), 1)
    return tl.sum(lanes, 1)
