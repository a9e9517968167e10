"""Cosines and sines for rotary embeddings, the same bits on every machine.

Powers and trigonometric functions of libraries round differently; here powers are rounded correctly and the others use
additions and multiplications in float64 (docs/numerics.md).
"""

from __future__ import annotations

import functools
from decimal import Decimal, localcontext

import numpy as np

from detgen.program.fdlibm import polynomial

# pi / 2 in parts of 33 bits, so that whole multiples of the first two are exact, and the polynomials of fdlibm's
# __kernel_sin and __kernel_cos (Sun Microsystems, 1993) for up to pi / 4.
_PARTS = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_SINE = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COSINE = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)


@functools.lru_cache(maxsize=16)
def powers(base: float, exponents: tuple[float, ...]) -> np.ndarray:
    """base ** exponents, float32 [n], rounded correctly."""
    return np.array([power(base, x) for x in exponents], dtype=np.float32)


def power(base: float, exponent: float) -> float:
    """base ** exponent, rounded correctly."""
    with localcontext() as context:
        context.prec = 40
        return float(Decimal(base) ** Decimal(exponent))


def turns(frequencies: np.ndarray, amplitude: float, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of positions `first` to `last` - 1, times an amplitude.

    Args:
        frequencies: float32 [n]; angles are their products with the positions, in float32.
        amplitude: amplitude of the results.
        first: the first position, below 2 ** 17 * pi / 2, like `last`.
        last: one past the last position.

    Returns:
        float32 [positions, n] each.
    """
    positions = np.arange(first, last, dtype=np.float32)[:, None]
    x = (positions * frequencies).astype(np.float64)
    n = np.rint(x * (2 / np.pi))
    r = ((x - n * _PARTS[0]) - n * _PARTS[1]) - n * _PARTS[2]
    z = r * r
    sine = r + r * z * polynomial(_SINE, z)
    cosine = (1 - z * 0.5) + z * z * polynomial(_COSINE, z)
    quadrant = n.astype(np.int64) & 3
    odd = quadrant & 1 == 1
    cosines = np.where(odd, sine, cosine) * np.where((quadrant + 1) & 2 == 2, -amplitude, amplitude)
    sines = np.where(odd, cosine, sine) * np.where(quadrant & 2 == 2, -amplitude, amplitude)
    return cosines.astype(np.float32), sines.astype(np.float32)
