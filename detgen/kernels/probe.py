"""Which shapes of a tensor function agree bit for bit.

Nothing is assumed of a library's kernels: a function is run at the shapes that are meant to be used and the results
are compared as bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from detgen.kernels.attention import BLOCK, Attend

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    return x.contiguous().view(_BITS[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))


def key_lengths(
    attend: Attend, heads: int, group: int, size: int, dtype: torch.dtype, device: torch.device, rows: int
) -> tuple[int, ...] | None:
    """Key lengths, in multiples of BLOCK up to a period of 512, that agree with the longer ones.

    torch's fused kernel takes keys 512 at a time, so a length's class is decided by its remainder. A length of the
    class gives a row the same bits as any longer length does.

    Args:
        attend: the implementation.
        heads: KV heads.
        group: query heads a KV head.
        size: head size.
        dtype: of queries, keys and values.
        device: where to run.
        rows: least rows of a tile.

    Returns:
        The lengths out of (128, 256, 384, 512) that may be read, 512 among them; None if 512 and 1024 disagree.
    """
    g = torch.Generator().manual_seed(0)
    longest = 8 * BLOCK
    tokens = -(-rows // group)
    k, v = (torch.randn(2, longest, heads, size, generator=g).to(device, dtype) for _ in range(2))
    q = torch.randn(2, heads, group * tokens, size, generator=g).to(device, dtype)

    def result(visible: int, length: int) -> torch.Tensor:
        mask = torch.zeros(2, 1, group * tokens, length, dtype=dtype, device=device)
        mask[..., visible:] = float("-inf")
        return attend(q, k[:, :length], v[:, :length], mask, size**-0.5, None)

    def agree(length: int, longer: Iterable[int]) -> bool:
        seen = [length - BLOCK // 2, length]
        return all(same_bits(result(s, length), result(s, other)) for s in seen for other in longer)

    period = 4 * BLOCK
    # Lengths beyond one period first: the whole period must be a prefix of longer readings.
    if not agree(period, (period + BLOCK, longest - BLOCK, longest)):
        return None
    short = [n for n in (BLOCK, 2 * BLOCK, 3 * BLOCK) if agree(n, (period, longest))]
    return (*(n for n in short if agree(period + n, (longest,))), period)
