"""The logarithm in float64, with the same bits on every machine: it uses only additions, products and quotients.

The algorithm and constants are those of fdlibm's e_log.c (Sun Microsystems, 1993), without its special cases; errors
stay below one unit in the last place.
"""

from __future__ import annotations

import numpy as np

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOGARITHM = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)


def polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """Horner's scheme, the lowest power first."""
    p = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        p = p * x + c
    return p


def logarithm(x: np.ndarray) -> np.ndarray:
    """Natural logarithm, float64 [n], of positive finite numbers."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752440
    f = np.where(small, 2 * mantissa, mantissa) - 1
    k = (exponent - small).astype(np.float64)
    s = f / (2 + f)
    square = s * s
    half = 0.5 * f * f
    rest = square * polynomial(_LOGARITHM, square)
    found: np.ndarray = k * _LN2_HIGH - ((half - (s * (half + rest) + k * _LN2_LOW)) - f)
    return found
