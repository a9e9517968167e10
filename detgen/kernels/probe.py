"""Finds the shapes at which a tensor function gives the same bits.

Assumes nothing about a library's kernels: runs the function at the shapes to be used and compares the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from detgen.kernels.attention import BLOCK, MOST_TILE_ROWS, PERIOD, Attend, AttentionTraits

_CROWD = 32  # slots of a large tile: enough work that a GPU kernel does not split a row's keys among its processors

_CANCELLING = 16  # rows of a product that are compared

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The memory as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    return x.contiguous().view(_BITS[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))


def key_lengths(
    attend: Attend,
    heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    traits: AttentionTraits | None = None,
) -> tuple[int, ...]:
    """Key lengths, in multiples of BLOCK up to PERIOD, at which a row has the same bits as at longer ones.

    torch's fused kernel takes keys PERIOD at a time, so the remainder decides a length's class.

    Args:
        attend: the implementation.
        heads: KV heads.
        size: head size.
        dtype: of queries, keys and values.
        device: where to run.
        rows: a tile's rows are a multiple of this; the bits must be the same for few, many and a ragged number, at any
            place, in a tile of one slot as in one of many, and on a CPU for one thread as for torch's present number.
        traits: that a layer asks for, since tiles of others may take another way; None scales by size ** -0.5 alone.

    Returns:
        The lengths out of (BLOCK, ..., PERIOD) that a tile may read, PERIOD among them; empty if PERIOD itself
        disagrees with longer ones.
    """
    candidates = tuple(range(BLOCK, PERIOD + 1, BLOCK))
    if dtype != torch.float32:
        # Rounding to 16 bits hides most differences of a sum's order; the float32 kernels are cut the same way.
        candidates = key_lengths(attend, heads, size, torch.float32, device, rows, traits)
        if not candidates:
            return ()
    g = torch.Generator().manual_seed(0)
    traits = traits or AttentionTraits(size**-0.5)
    longest = 2 * PERIOD
    many, *ragged = (n // rows * rows for n in (MOST_TILE_ROWS, 36, 68, 100))
    few = {rows, min(2 * rows, many), many}
    k, v = (torch.randn(2, longest, heads, size, generator=g).to(device, dtype) for _ in range(2))
    q = torch.randn(2, heads, many, size, generator=g).to(device, dtype)

    def result(order: torch.Tensor, visible: int, length: int) -> torch.Tensor:
        mask = torch.zeros(2, 1, len(order), length, dtype=dtype, device=device)
        mask[..., visible:] = float("-inf")
        return attend(q[:, :, order], k[:, :length], v[:, :length], mask, traits)

    def beside(slots: int, length: int) -> torch.Tensor:
        mask = torch.zeros(slots, 1, rows, length, dtype=dtype, device=device)
        queries, keys, values = (
            x[:1].expand(slots, -1, -1, -1) for x in (q[:, :, :rows], k[:, :length], v[:, :length])
        )
        return attend(queries.contiguous(), keys, values, mask, traits)

    @cache
    def wanted(visible: int) -> torch.Tensor:
        return result(torch.arange(many, device=device), visible, longest)

    def agrees(length: int) -> bool:
        for visible in (length - BLOCK // 2, length - 3, length):
            want = wanted(visible)
            for count in few.union(ragged if length == PERIOD else ()) - {0}:
                order = torch.randperm(many, generator=g)[:count].to(device)  # each row at another place
                if not same_bits(want[:, :, order], result(order, visible, length)):
                    return False
        alike = want[:1, :, :rows].expand(_CROWD, -1, -1, -1)  # of `length` visible keys
        return all(same_bits(alike[:slots], beside(slots, length)) for slots in (1, _CROWD))

    shorter = candidates[:-1]
    threads = torch.get_num_threads()
    try:
        for count in sorted({threads, 1}, reverse=True) if device.type == "cpu" else (threads,):
            torch.set_num_threads(count)
            if not agrees(PERIOD) or not agrees(2 * PERIOD):
                return ()
            shorter = tuple(n for n in shorter if agrees(n) and agrees(PERIOD + n))
    finally:
        torch.set_num_threads(threads)
    return (*shorter, PERIOD)


class Product:
    """A product in 16 bits, to be tried at many row counts.

    Rounding to 16 bits hides nearly all differences of a sum's order: on random inputs a few outputs in a hundred
    thousand show one. Inputs that are orthogonal to weight rows make the terms of their sums cancel, so that what is
    left, and what is rounded, is of the size of the terms' own rounding; one output in fifty shows another order.

    Args:
        compute: [rows, in] -> [rows, out], both in the dtype and on the device of `sample`.
        sample: [some, in], rows of the weight.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor) -> None:
        self._compute = compute
        size = sample.shape[1]
        few = sample[: max(size // 4, 1)].double().cpu()
        x = torch.randn(_CANCELLING, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x -= torch.linalg.lstsq(few, few @ x.T, driver="gelsd").solution.T
        self._rows = x.to(sample.device, sample.dtype)

    def learn(self, count: int) -> None:
        """Make the results at a row count the reference for the others."""
        self._want = self._results(count)[:_CANCELLING]

    def agrees(self, count: int) -> bool:
        """Whether the results at a row count are the reference's, at every place."""
        found = self._results(count)
        return same_bits(found, self._want[torch.arange(len(found), device=found.device) % _CANCELLING])

    def _results(self, count: int) -> torch.Tensor:
        """Those of all rows, one after the other, in passes of `count` rows."""
        passes = -(-_CANCELLING // count)
        rows = self._rows[torch.arange(passes * count, device=self._rows.device) % _CANCELLING]
        return torch.cat([self._compute(part) for part in rows.split(count)])
