"""Functions with a fixed order of operations: the bits that docs/numerics.md defines, on any GPU and with any compiler.

Triton's own `exp` is the GPU's approximation, its `/` and `sqrt` may be, and its `log` comes from a library; these
functions consist of additions, products, quotients and fused multiply-adds, each rounded according to IEEE 754, so that
a result depends only on its argument, and tests without a GPU see the bits of a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from detgen.program.operands import Activation

_SILU = tl.constexpr(int(Activation.SILU))
_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_GELU = tl.constexpr(int(Activation.GELU))
_RELU = tl.constexpr(int(Activation.RELU))
_RELU_SQUARED = tl.constexpr(int(Activation.RELU_SQUARED))
_SIGMOID = tl.constexpr(int(Activation.SIGMOID))
_TANH = tl.constexpr(int(Activation.TANH))
_ROOT = tl.constexpr(int(Activation.ROOT))
_RECIPROCAL_ROOT = tl.constexpr(int(Activation.RECIPROCAL_ROOT))


@triton.jit
def nearest_bf16(x):
    """Round float32 to bf16, ties to even, kept in float32; not for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def exponential(x):
    """e^x of float32 up to 88, and 0 below -87: Cephes' `expf`, like `arithmetic.exponential`."""
    inside = tl.where(x < -87.0, -87.0, x)
    n = tl.fma(inside, 1.44269504, 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
    r = tl.fma(n, -0.693359375, inside)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p * r, r, r) + 1.0
    whole = tl.where(n == n, n, 0.0).to(tl.int32)  # if n is NaN, so is p
    power = ((whole + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, p * power)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), from e^-|x|, which cannot overflow."""
    e = exponential(tl.abs(x) * -1.0)
    return tl.div_rn(tl.where(x < 0.0, e, 1.0), e + 1.0)


@triton.jit
def _signed_as(a, b):
    """Return a, which is not negative, with the sign of b."""
    return tl.where(b.to(tl.int32, bitcast=True) < 0, a * -1.0, a)


@triton.jit
def tangent(x):
    """tanh x, like `arithmetic.tangent`."""
    square = x * x
    p = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, square, -5.37397155531e-2)
    p = tl.fma(p, square, 1.33314422036e-1)
    p = tl.fma(p, square, -3.33332819422e-1)
    p = tl.fma(p * square, x, x)
    e = exponential(tl.abs(x) * -2.0)
    return tl.where(tl.abs(x) > 0.625, _signed_as(tl.div_rn(1.0 - e, e + 1.0), x), p)


@triton.jit
def error_function(x):
    """erf x, like `arithmetic.error_function`."""
    size, square = tl.abs(x), x * x
    p = tl.fma(square, 7.853906573e-05, -8.010208257e-04)
    p = tl.fma(p, square, 5.188329611e-03)
    p = tl.fma(p, square, -2.685381286e-02)
    p = tl.fma(p, square, 1.128358543e-01)
    p = tl.fma(p, square, -3.761262596e-01)
    p = tl.fma(p, square, 1.283791661e-01)
    t = tl.where(size > 4.0, 4.0, size)
    r = tl.fma(t, -1.413368045e-05, 3.523305932e-04)
    r = tl.fma(r, t, -3.764653811e-03)
    r = tl.fma(r, t, 2.402549610e-02)
    r = tl.fma(r, t, -1.065490916e-01)
    r = tl.fma(r, t, -6.349583268e-01)
    r = tl.fma(r, t, -1.128697157e00)
    return tl.where(size > 1.0, _signed_as(1.0 - exponential(r * t), x), tl.fma(p, x, x))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply a function of `Activation`."""
    if KIND == _SILU:
        x = x * sigmoid(x)
    elif KIND == _GELU_TANH:
        x = (x * 0.5) * (tangent(tl.fma(x * x * x, 0.044715, x) * 0.7978845608) + 1.0)
    elif KIND == _GELU:
        x = (x * 0.5) * (error_function(x * 0.7071067812) + 1.0)
    elif KIND == _RELU:
        x = tl.where(x < 0.0, 0.0, x)
    elif KIND == _RELU_SQUARED:
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    elif KIND == _SIGMOID:
        x = sigmoid(x)
    elif KIND == _TANH:
        x = tangent(x)
    elif KIND == _ROOT:
        x = tl.sqrt_rn(x)
    elif KIND == _RECIPROCAL_ROOT:
        x = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
    return x


@triton.jit
def capped(x, cap):
    """tanh(x / cap) * cap."""
    return tangent(tl.div_rn(x, tl.zeros_like(x) + cap)) * cap


@triton.jit
def logarithm(x):
    """Natural logarithm of float64, positive, finite and normal: fdlibm's `log`, like `fdlibm.logarithm`."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # at least 0.5, below 1
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
    """e^x of float32 up to 0 in units of 2^-40, rounded to int64, like `filters.shares`.

    Sums are the same in every order; that of a row of fewer than 2^23 entries does not overflow.
    """
    units = exponential(x).to(tl.float64) * 1099511627776.0
    return (units + 6755399441055744.0 - 6755399441055744.0).to(tl.int64)  # 1.5 * 2^52: adding it rounds


@triton.jit
def fold(lanes, ROWS: tl.constexpr, LANES: tl.constexpr = 16):
    """Add up lanes, [ROWS, LANES] -> [ROWS]: sixteen, or the first LANES of them if the others are 0.

    Lanes eight apart are added, then four, two and one apart.
    """
    if LANES == 16:
        a, b = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, 8)), (0, 2, 1)))
        lanes = a + b
    if LANES >= 8:
        a, b = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, 4)), (0, 2, 1)))
        lanes = a + b
    if LANES >= 4:
        a, b = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, 2)), (0, 2, 1)))
        lanes = a + b
    if LANES >= 2:
        a, b = tl.split(lanes)
        lanes = a + b
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def part_of(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows (int64) and columns of a program's tile, and which of its entries, [ROWS, COLUMNS], exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def put(to, x, there, factor, ADDS: tl.constexpr, SCALES: tl.constexpr):
    """Store or add x * factor, according to `Into`."""
    if SCALES:
        x = x * factor
    if ADDS:
        x = tl.load(to, mask=there, other=0.0) + x
    tl.store(to, x, mask=there)
