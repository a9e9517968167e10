"""The most likely tokens of rows and their log-probabilities, with the bits of docs/numerics.md.

Promise: the results for a row depend on its logits and on the wanted number. Entries are ranked by a whole number made
of the log-probability and, for ties, the id, so no two are equal and the order of comparisons does not matter. Of two
launches, the first finds the most likely tokens of each section, the second those of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.filter_kernels import key
from detgen.kernels.triton.launching import OPTIONS, above
from detgen.kernels.triton.row_reading import SECTION, Read, log_total

_LEAST: tl.constexpr = tl.constexpr(-(1 << 63))  # below any rank


@triton.jit
def _of_sections(
    logits, tops, totals, counts, ranks, stride, vocabulary, sections, blocks, most, SECTION: tl.constexpr
):
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.minimum(tl.load(counts + row), most)
    if count > 0:
        largest, log = log_total(tops + row * blocks, totals + row * blocks, blocks)
        at = section * SECTION + tl.arange(0, SECTION)
        x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=0.0)
        rank = (key(x - largest - log).to(tl.int64) << 32) | (at ^ 0x7FFFFFFF)
        rank = tl.where(at < vocabulary, rank, _LEAST)
        for place in range(0, count):
            best = tl.max(rank, 0)
            tl.store(ranks + (row * sections + section) * most + place, best)
            rank = tl.where(rank == best, _LEAST, rank)


@triton.jit
def _of_rows(ranks, counts, out, sections, most, SECTIONS: tl.constexpr, MOST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + row), most)
    section, place = tl.arange(0, SECTIONS)[:, None], tl.arange(0, MOST)[None, :]
    there = (section < sections) & (place < count)
    rank = tl.load(ranks + (row * sections + section) * most + place, mask=there, other=_LEAST)
    for at in range(0, count):
        best = tl.max(rank)
        bits = (best >> 32).to(tl.int32)
        tl.store(out + 2 * (row * most + at), (best.to(tl.int32) & 0x7FFFFFFF) ^ 0x7FFFFFFF)
        tl.store(out + 2 * (row * most + at) + 1, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
        rank = tl.where(rank == best, _LEAST, rank)


def likely(logits: torch.Tensor, found: Read, counts: torch.Tensor, most: int) -> torch.Tensor:
    """Find the most likely tokens, in descending order; of equal ones the lower id comes first.

    Args:
        logits: as for `sampling_kernels.choose`.
        found: the result of `read` for them.
        counts: int64 [rows], how many tokens each row wants, on the same device.
        most: the largest of these counts.

    Returns:
        int32 [rows, 2 * most], pairs of a token and the bits of its log-probability; 0 beyond a row's count.
    """
    (rows, vocabulary), (sections, blocks) = logits.shape, (found.best.shape[1], found.tops.shape[1])
    ranks = torch.empty(rows, sections, most, dtype=torch.int64, device=logits.device)
    out = torch.zeros(rows, 2 * most, dtype=torch.int32, device=logits.device)
    _of_sections[(rows, sections)](
        *(logits, found.tops, found.totals, counts, ranks),
        *(logits.stride(0), vocabulary, sections, blocks, most, SECTION),
        **OPTIONS,
    )
    _of_rows[(rows,)](ranks, counts, out, sections, most, above(sections), above(most), **OPTIONS)
    return out
