"""Counter-based noise, with the same words and the same bits as `detgen.kernels.noise`, its reference.

Promise: an entry's noise depends only on seed, sample, position and entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from detgen.kernels.triton.float_functions import logarithm


@triton.jit
def _words(seed, sample, position, block):
    """Philox4x64-10 (Salmon et al., SC 2011) of key (seed, sample) and counter (block, position, 0, 0)."""
    a, b = block.to(tl.uint64), tl.zeros_like(block).to(tl.uint64) + position
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    for _ in tl.static_range(10):
        high, low = tl.umulhi(a, 0xD2E7470EE14C6C93), a * 0xD2E7470EE14C6C93
        upper, lower = tl.umulhi(c, 0xCA5A826395121157), c * 0xCA5A826395121157
        a, b, c, d = upper ^ b ^ seed, lower, high ^ d ^ sample, low
        seed += 0x9E3779B97F4A7C15
        sample += 0xBB67AE8584CAA73B
    return a, b, c, d


@triton.jit
def words_of(seed, sample, position, block, BLOCKS: tl.constexpr):
    """Return the random words of entries 4 * block to 4 * block + 3, uint64 [BLOCKS, 4], for blocks int32 [BLOCKS].

    Seed, sample and position are uint64.
    """
    a, b, c, d = _words(seed, sample, position, block)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCKS, 4))


@triton.jit
def word_of(seed, sample, position, entry):
    """Return the random words of single entries, uint64 [n], for int32 [n]."""
    a, b, c, d = _words(seed, sample, position, entry // 4)
    return tl.where(entry % 4 < 2, tl.where(entry % 4 == 0, a, b), tl.where(entry % 4 == 2, c, d))


@triton.jit
def gumbel(word):
    """Return Gumbel(0, 1) noise, float64, from random words."""
    uniform = ((word >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    uniform = tl.where(uniform < 1.0, uniform, uniform - 1.1102230246251565e-16)  # else the last word's is 1
    return -logarithm(-logarithm(uniform))


@triton.jit
def most_gumbel(word):
    """Return an upper bound of `gumbel` up to 1e-5, float32, without float64, like `noise.most_gumbel`."""
    rest = ((word >> 32).to(tl.uint32) ^ 0xFFFFFFFF).to(tl.float32)
    return 22.18070977791825 - tl.log(rest + 5.960464477539063e-08)
