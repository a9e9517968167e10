"""Sequences in pages, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, AttentionTraits, cut_pieces
from detgen.kernels.triton.attend import attend, most_tokens

Row = tuple[int, int]
"""A slot, and a position in its sequence."""


class Cache(NamedTuple):
    """A layer's keys and values, [positions, kv_heads, size] each, and the slots' pages, int64 [slots, blocks]."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], kv_heads: int, size: int, dtype: torch.dtype, device: str, seed: int | None = None
    ) -> Cache:
        """Random entries for sequences of these lengths, on pages in order, or shuffled by a seed, spare ones between.

        What lies behind a sequence on its last page is random as well.
        """
        blocks = [-(-n // BLOCK) for n in lengths]
        total = sum(blocks)
        if seed is not None:
            total += len(blocks)
        order = torch.arange(total)
        if seed is not None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        tables = order[0].repeat(len(blocks), max(blocks))
        for slot, (count, last) in enumerate(zip(blocks, np.cumsum(blocks).tolist(), strict=True)):
            tables[slot, :count] = order[last - count : last]
        keys, values = (torch.randn(total * BLOCK, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, tables.to(device))

    def places(self, slot: int, positions: int) -> torch.Tensor:
        """Where the first positions of a slot are, int64 [positions]."""
        at = torch.arange(positions, device=self.tables.device)
        return self.tables[slot, at // BLOCK] * BLOCK + at % BLOCK


class Packed(NamedTuple):
    """Rows as the kernel takes them: positions, pieces of windows, and the longest sequence that they need."""

    positions: torch.Tensor
    pieces: torch.Tensor
    longest: int

    @classmethod
    def of(cls, rows: Sequence[Row], group: int, device: str) -> Packed:
        """Neighbouring rows at consecutive positions of a slot are a window."""
        firsts = [i for i, (slot, position) in enumerate(rows) if not i or rows[i - 1] != (slot, position - 1)]
        lengths = np.diff([*firsts, len(rows)])
        slots, starts = np.array([rows[i] for i in firsts], np.int64).T
        pieces = torch.from_numpy(cut_pieces(slots, starts, lengths, most_tokens(group)))
        positions = torch.tensor([position for _, position in rows])
        return cls(positions.to(device), pieces.to(device), int(positions.max()) + 1)


def attend_rows(cache: Cache, queries: torch.Tensor, packed: Packed, traits: AttentionTraits) -> torch.Tensor:
    """Attention of rows, [rows, heads, size], in detgen's kernel."""
    return attend(queries, *cache[:2], packed.positions, packed.pieces, cache.tables, packed.longest, traits)


def attend_exactly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, traits: AttentionTraits, dtype: torch.dtype
) -> torch.Tensor:
    """One row by plain operators in some type: q [heads, size], k and v [positions, kv_heads, size]."""
    low = max(position - (traits.window or position + 1) + 1, 0)
    group = q.shape[0] // k.shape[1]
    k, v = (x[low : position + 1].to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,phd->hp", q.to(dtype), k) * traits.scale
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    return torch.einsum("hp,phd->hd", scores.softmax(-1), v)
