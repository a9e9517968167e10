"""Rounds of drafting and verifying whose tokens, lengths and ends stay on the device, so that the host waits once.

Promise: a sequence goes on from what `engine.verification.judge` would commit of its window. The row of a token is what
it is in any pass, so what rounds give has the bits of rounds that the host sees one by one.

A sheet holds a row for each sequence. The tokens of a row are the last two and the draft behind them; the one in column
c stands at position length - 2 + c. Before a pass, `_place` fills in its rows from the sheet; after it, `_note` adds
what was drafted, or `_judge` moves the sequence on. Rows that a window does not need this time belong to no piece, and
write to the scratch page.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.input_batch import Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.rounds import Limits, Pass, Passes, Round, Rounds
from detgen.kernels.triton.growing_lists import DraftedLists, GrowingLists
from detgen.kernels.triton.launching import OPTIONS, above, sent
from detgen.kernels.triton.row_reading import Lists
from detgen.program.operands import PAGE
from detgen.program.rows import Rows

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choices

_PAGE = tl.constexpr(PAGE)
# Columns of a sheet, and of the limits of its sequences.
LENGTH: tl.constexpr = tl.constexpr(0)
ALIVE: tl.constexpr = tl.constexpr(1)
COUNT: tl.constexpr = tl.constexpr(2)  # of drafted tokens: those there will be, until the draft ends
TOKENS: tl.constexpr = tl.constexpr(3)
DRAFTED: tl.constexpr = tl.constexpr(0)
REACH: tl.constexpr = tl.constexpr(1)
ROOM: tl.constexpr = tl.constexpr(2)
END: tl.constexpr = tl.constexpr(3)
LEAST: tl.constexpr = tl.constexpr(4)
ENDING: tl.constexpr = tl.constexpr(5)


@triton.jit(do_not_specialize=("width", "column", "step", "scratch", "of_window", "of_block", "most"))
def _place(
    ids,
    positions,
    places,
    pieces,
    tables,
    sheet,
    width,
    layout,
    column,
    step,
    scratch,
    of_window,
    of_block,
    most,
    ROWS: tl.constexpr,
):
    window, at = tl.program_id(0), tl.arange(0, ROWS)
    sequence, first = tl.load(layout + 4 * window), tl.load(layout + 4 * window + 1)
    rows, piece = tl.load(layout + 4 * window + 2), tl.load(layout + 4 * window + 3)
    of = sheet + sequence * width
    start, count = tl.load(of + LENGTH) - 2 + column, tl.load(of + COUNT)
    there = tl.where(step < 0, count + 1, tl.where(count > step, rows, 0))
    there = tl.where(tl.load(of + ALIVE) > 0, tl.minimum(there, rows), 0)
    goes, inside, position = at < there, at < rows, start + at
    token = tl.load(of + TOKENS + column + at, mask=goes, other=0)
    page = tl.load(tables + window * of_window + position // _PAGE * of_block, mask=goes, other=0)
    tl.store(ids + first + at, token, mask=inside)
    tl.store(positions + first + at, tl.where(goes, position, 0), mask=inside)
    tl.store(places + first + at, tl.where(goes, page * _PAGE + position % _PAGE, scratch), mask=inside)
    cut = at * most
    tl.store(pieces + 4 * (piece + at) + 1, start + cut, mask=cut < rows)
    tl.store(pieces + 4 * (piece + at) + 2, tl.minimum(tl.maximum(there - cut, 0), most), mask=cut < rows)


@triton.jit
def _ends(token, limits, bounds):
    """Return which tokens are among those that end a sequence, or none at all."""
    found = token < 0
    for at in range(ENDING, bounds):
        found = found | (token == tl.load(limits + at))
    return found


@triton.jit(do_not_specialize=("width", "bounds", "step"))
def _note(packed, stride, sheet, width, limits, bounds, layout, step):
    window = tl.program_id(0)
    sequence = tl.load(layout + 4 * window)
    of = sheet + sequence * width
    if (tl.load(of + ALIVE) > 0) & (tl.load(of + COUNT) > step):
        token = tl.load(packed + window * stride + 3).to(tl.int64)
        if token >= 0:
            tl.store(of + TOKENS + 2 + step, token)
        if _ends(token, limits + sequence * bounds, bounds):
            tl.store(of + COUNT, step + (token >= 0).to(tl.int64))


@triton.jit(do_not_specialize=("width", "bounds"))
def _judge(packed, stride, broken, sheet, width, limits, bounds, layout, ROWS: tl.constexpr):
    window, at = tl.program_id(0), tl.arange(0, ROWS)
    sequence, first = tl.load(layout + 4 * window), tl.load(layout + 4 * window + 1)
    of, limits = sheet + sequence * width, limits + sequence * bounds
    if tl.load(of + ALIVE) > 0:
        length, count = tl.load(of + LENGTH), tl.load(of + COUNT)
        there = at <= count
        chosen = tl.load(packed + (first + at) * stride + 3, mask=there, other=-1).to(tl.int64)
        draft = tl.load(of + TOKENS + 2 + at, mask=at < count, other=-1)
        infinite = (chosen < 0) | (tl.load(broken + first + at, mask=there, other=0) > 0)
        accepted = tl.min(tl.where((at < count) & (chosen == draft), ROWS, at), 0)
        produced = length + at + 1
        stops = _ends(chosen, limits, bounds) & (produced > tl.load(limits + LEAST))
        over = there & (infinite | stops | (produced >= tl.load(limits + END)))
        end = tl.min(tl.where(over, at, ROWS), 0)
        last = tl.minimum(accepted, end)
        length += last + 1
        before = tl.load(of + TOKENS + 1)
        before = tl.where(last > 0, tl.sum(tl.where(at == last - 1, chosen, 0), 0), before)
        alive = (end > accepted) & (length <= tl.load(limits + ROOM))
        drafted = tl.minimum(tl.load(limits + REACH) - length, tl.load(limits + DRAFTED))
        tl.store(of + LENGTH, length)
        tl.store(of + ALIVE, alive.to(tl.int64))
        tl.store(of + COUNT, tl.where(alive, tl.maximum(drafted, 0), 0))
        tl.store(of + TOKENS, before)
        tl.store(of + TOKENS + 1, tl.sum(tl.where(at == last, chosen, 0), 0))


class Sheet:
    """The sequences of a call, on a device.

    Args:
        asked: the rounds.
        device: where they run.

    Attributes:
        known: int64 [sequences, columns], see above.
    """

    def __init__(self, asked: Rounds, device: torch.device) -> None:
        limits, windows, count = asked.limits, asked.windows, len(asked.limits.drafted)
        most = int(limits.drafted.max())
        known = np.zeros((len(windows), 5 + most), np.int64)
        known[:, 0], known[:count, 1], known[:, 4] = windows.starts + 1, 1, windows.tokens
        known[:count, 2] = _counts(limits, known[:count, 0])
        bounds = np.column_stack([*limits[:-1], limits.ending])
        self.known, self._limits = (sent(torch.from_numpy(x), device) for x in (known, bounds))
        self._device, self._asked, self._rows = device, asked, above(1 + most, 2)
        self._layouts: dict[Pass, torch.Tensor] = {}
        self._positions: dict[Pass, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lists: DraftedLists | None = None
        if asked.choices is not None and (growing := asked.choices.growing) is not None:
            counted = np.zeros(len(windows), np.int64)
            counted[:count] = asked.turns * (1 + limits.drafted)
            own = GrowingLists.of(growing, counted, device)
            self._lists = DraftedLists(own, known[:, 0] + own.left, LENGTH.value, TOKENS.value + 2)

    def copy(self) -> torch.Tensor:
        """Return a copy of `known`, from which `judge` tells what it has committed."""
        self._before = self.known.clone()
        return self._before

    def place(self, one: Pass, rows: Rows, scratch: int, most: int) -> None:
        """Fill in the rows of a pass, whose pieces have at most `most` tokens."""
        _place[(len(one.which),)](
            *(rows.ids, rows.positions, rows.places, rows.pieces, rows.tables, self.known, self.known.shape[1]),
            *(self._layout(one, most), one.column, one.step, scratch, *rows.tables.stride(), most, self._rows),
            num_warps=1,
            **OPTIONS,
        )

    def _layout(self, one: Pass, most: int = 1) -> torch.Tensor:
        """Return, on the device, the sequence of each window of a pass, its first row, its rows and its first piece."""
        if one not in self._layouts:
            lengths = one.batch.windows.lengths[: len(one.which)]
            first, piece = (counts.cumsum() - counts for counts in (lengths, -(-lengths // most)))
            layout = np.column_stack([one.which, first, lengths, piece])
            self._layouts[one] = sent(torch.from_numpy(layout), self._device)
        return self._layouts[one]

    def choices(self, one: Pass) -> tuple[Choices | None, Lists | None, torch.Tensor | None]:
        """Return how the wanted rows of a pass choose, their adjustments, and their positions in completions."""
        choices = self._asked.choices
        if choices is None:
            return None, None, None
        counts = one.batch.windows.logits[: len(one.which)]
        owner = np.append(np.repeat(one.which, counts), one.others)
        how = choices.take(owner)
        if one.step >= 0:
            how = replace(how, likely=None)
            if self._lists is None and not how.temperature.any():
                return None, None, None
        depth = np.full(len(owner), max(one.step, 0))
        rows = int(counts.sum())
        depth[:rows] += np.arange(rows) - np.repeat(counts.cumsum() - counts, counts)
        if one not in self._positions:
            rows_of = sent(torch.from_numpy(np.stack([owner, depth - self._asked.prompts[owner]])), self._device)
            self._positions[one] = rows_of[0], rows_of[1]
        of, ahead = self._positions[one]
        lists = None if self._lists is None else self._lists.of(one, owner, depth, self.known)
        return how, lists, self.known[:, 0][of] + ahead

    def note(self, one: Pass, packed: torch.Tensor) -> None:
        """Add drafted tokens, of what `sampling_kernels.choose` gives for the windows of a pass."""
        _note[(len(one.which),)](
            *(packed, packed.shape[1], self.known, self.known.shape[1]),
            *(self._limits, self._limits.shape[1], self._layout(one), one.step),
            num_warps=1,
            **OPTIONS,
        )

    def judge(self, one: Pass, packed: torch.Tensor, broken: torch.Tensor) -> None:
        """Move the sequences on, by what was chosen in a pass that verifies, and int8 [rows], which are broken."""
        _judge[(len(one.which),)](
            *(packed, packed.shape[1], broken, self.known, self.known.shape[1]),
            *(self._limits, self._limits.shape[1], self._layout(one), self._rows),
            num_warps=1,
            **OPTIONS,
        )
        if self._lists is not None:
            lengths = one.batch.windows.lengths[: len(one.which)]
            self._lists.stand(one, one.which, lengths.cumsum() - lengths, self.known, self._before, packed)


def _counts(limits: Limits, lengths: np.ndarray) -> np.ndarray:
    """Return how many tokens sequences of these lengths draft."""
    found: np.ndarray = np.clip(limits.reach - lengths, 0, limits.drafted)
    return found


def told(asked: Rounds, passes: Passes, sheets: np.ndarray, scores: Scores, broken: np.ndarray) -> list[Round]:
    """Return what rounds gave.

    Args:
        asked: the rounds.
        passes: their passes.
        sheets: int64 [rounds, sequences, columns], as they were before the verifying passes of each round.
        scores: of all rows of these passes that are wanted, pass by pass.
        broken: bool [rows], of all their rows.
    """
    found, row, wanted = [], 0, 0
    for sheet, ones in zip(sheets, passes.verifying, strict=True):
        counts = np.where(sheet[:, 1] > 0, 1 + sheet[:, 2], 0)
        which = np.flatnonzero(counts)
        own, slots = counts[which], asked.windows.slots[which]
        tokens, rows, of = (list[np.ndarray]() for _ in range(3))
        others, rows_of_others, of_others = list[Windows](), list[np.ndarray](), list[np.ndarray]()
        for one in ones:
            windows, count = one.batch.windows, len(one.which)
            lengths = windows.lengths[:count]
            owner, placed = np.repeat(one.which, lengths), int(lengths.sum())
            depth = np.arange(placed) - np.repeat(lengths.cumsum() - lengths, lengths)
            there = np.flatnonzero(depth < counts[owner])
            tokens.append(sheet[owner[there], 4 + depth[there]])
            rows.append(row + there)
            of.append(wanted + there)
            others.append(windows.part(count, len(windows)))
            rows_of_others.append(np.arange(row + placed, row + len(windows.tokens)))
            of_others.append(np.arange(wanted + placed, wanted + one.batch.count))
            row, wanted = row + len(windows.tokens), wanted + one.batch.count
        mine = Windows(slots, sheet[which, 0] - 1, own, own, np.concatenate(tokens), own - 1)
        flags = broken[np.concatenate(rows + rows_of_others)]
        every = scores.only(np.concatenate(of + of_others))
        found.append(Round(reduce(Windows.joined, others, mine), which, every, np.flatnonzero(flags).tolist()))
    return found
