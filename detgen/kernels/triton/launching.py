"""What all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Whether kernels run in Triton's interpreter. It multiplies and adds bfloat16 wrongly without a word, so that kernels
# compute in float32, and it leaves products of matrices to numpy, whose sums depend on a row's place; see `product`.
INTERPRETED: bool = knobs.runtime.interpret

# Products and sums are fused only where a kernel says so: what a compiler would fuse changes with its version.
OPTIONS = {"enable_fp_fusion": False}


def above(size: int, least: int = 16) -> int:
    """The least power of two that holds `size`, and is at least `least`: the sizes that blocks have."""
    found: int = max(triton.next_power_of_2(size), least)
    return found


@triton.jit
def product(a, b, total, INTERPRETED: tl.constexpr):
    """total + a @ b, float32, by tensor cores; in the interpreter in float64, where a sum's order hardly matters."""
    if INTERPRETED:
        return total + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
