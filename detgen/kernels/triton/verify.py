"""The verdict on windows: what of each is committed, whether its sequence ends, and where that leaves its slot.

Promise: the verdict on a window depends on its rows and on its slot alone. It is that of `judge` in
`detgen.engine.verification`, the reference, with the ends that `Committing.commit` gives it, of sequences that no stop
string can end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS

# Rows of the table of slots. `length`, `prompt` and `limit` are numbers of tokens. Where `stops` is not 0, an
# end-of-sequence token stops the sequence if the completion has more than `least` tokens then. Not `busy` is who ended.
TABLE = "busy", "last", "length", "prompt", "limit", "least", "stops"
GOES_ON, STOP, LENGTH, FAILED = range(4)  # why a sequence ends
_TILE = 64  # rows of a window at a time


@triton.jit
def _verify(
    packed,
    firsts,
    drafted,
    windows,
    table,
    eos,
    out,
    slots,
    ends,
    TILE: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    FAILED: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    first, slot = tl.load(firsts + window), tl.load(windows + window)
    count = tl.load(firsts + window + 1) - first
    busy, length = tl.load(table + slot), tl.load(table + 2 * slots + slot)
    produced, limit = length - tl.load(table + 3 * slots + slot), tl.load(table + 4 * slots + slot)
    least, stops = tl.load(table + 5 * slots + slot), tl.load(table + 6 * slots + slot)
    differs, stopped = count, count
    for start in range(0, count, TILE):
        depth = start + tl.arange(0, TILE)
        token = tl.load(packed + 4 * (first + depth) + 3, mask=depth < count, other=-1)
        draft = tl.load(drafted + first + depth, mask=depth < count, other=-1)
        stop = tl.zeros((TILE,), tl.int32)
        for i in range(ends):
            stop += (token == tl.load(eos + i)).to(tl.int32)
        stop = (stop > 0) & (stops != 0) & (produced + depth + 1 > least)
        differs = tl.minimum(differs, tl.min(tl.where((token != draft) & (depth < count), depth, count), 0))
        stopped = tl.minimum(stopped, tl.min(tl.where(stop & (depth < count), depth, count), 0))
    full = tl.maximum(limit - length - 1, 0)  # the row whose token is the last for which there is room
    row = tl.minimum(tl.minimum(differs, stopped), full)
    token = tl.load(packed + 4 * (first + row) + 3).to(tl.int64)
    why = tl.where(row == stopped, STOP, tl.where(row == full, LENGTH, 0))
    why = tl.where(token < 0, FAILED, why)
    committed = tl.where((busy != 0) & (token >= 0), row + 1, 0)
    tl.store(out + 4 * window, tl.minimum(differs, committed).to(tl.int32))
    tl.store(out + 4 * window + 1, committed.to(tl.int32))
    tl.store(out + 4 * window + 2, tl.where(busy != 0, why, 0))
    tl.store(out + 4 * window + 3, row.to(tl.int32))
    tl.store(table + slot, tl.where(why == 0, busy, 0))
    tl.store(table + slots + slot, token, mask=committed > 0)
    tl.store(table + 2 * slots + slot, length + committed)


def verify(
    packed: torch.Tensor,
    firsts: torch.Tensor,
    drafted: torch.Tensor,
    windows: torch.Tensor,
    table: torch.Tensor,
    eos: torch.Tensor,
) -> torch.Tensor:
    """Judge the windows of a pass, and commit what stands.

    Args:
        packed: int32 [rows, 4], what `sampling.choose` found of the windows' rows.
        firsts: int64 [windows + 1], the first row of each window, ascending, and the number of rows.
        drafted: int64 [rows], the drafted token that follows each row; of a window's last row -1.
        windows: int64 [windows], the slot of each, each slot once.
        table: int64 [7, slots], see TABLE; changed in place: `busy`, `last` and `length` of slots that have windows.
        eos: int64 [n], the end-of-sequence tokens.

    Returns:
        int32 [windows, 4]: drafted tokens that stand; tokens committed, 0 of a slot that is not busy or whose sequence
        fails; why the sequence ends, GOES_ON if it does not; and the place in the window of the row that decided: of
        the last committed token, or the one that is not finite.
    """
    out = torch.empty(len(windows), 4, dtype=torch.int32, device=packed.device)
    _verify[(len(windows),)](
        *(packed, firsts, drafted, windows, table, eos, out, table.shape[1], len(eos)),
        *(_TILE, STOP, LENGTH, FAILED),
        **OPTIONS,
    )
    return out
