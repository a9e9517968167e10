"""Rounds of drafting and verifying whose tokens, lengths and ends stay on the device, so that the host waits once.

Promise: a sequence goes on from what `engine.verification.judge` would commit of its window. The row of a token is what
it is in any pass, so what rounds give has the bits of rounds that the host sees one by one.

A sheet holds a row for each sequence. The tokens of a row are the last two and the draft behind them; the one in column
c stands at position length - 2 + c. Before a pass, `_place` fills in its rows from the sheet; after it, `_note` adds
what was drafted, or `_judge` moves the sequence on. Where no model drafts, `_look_up` does, by the rule of
`drafters.ngram.NgramDrafter` for a text without a form. Rows that a window does not need this time belong to no piece,
and write to the scratch page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels.rounds import Limits, Pass, Rounds
from detgen.kernels.triton.growing_lists import DraftedLists, GrowingLists
from detgen.kernels.triton.launching import OPTIONS, above, sent, sent_together
from detgen.kernels.triton.row_reading import Lists
from detgen.program.operands import PAGE
from detgen.program.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from detgen.kernels.sampling import Choices

_PAGE = tl.constexpr(PAGE)
_MANY = 1024  # positions of a text that are looked at together
_MOST = tl.constexpr(1 << 32)  # positions of a text
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


@triton.jit(do_not_specialize=("width",))
def _look_up(texts, begins, sheet, before, width, ROWS: tl.constexpr, MANY: tl.constexpr):
    sequence, at = tl.program_id(0), tl.arange(0, ROWS)
    text, of = texts + tl.load(begins + sequence), sheet + sequence * width
    if (tl.load(of + ALIVE) > 0) & (tl.load(of + COUNT) > 0):
        length, count = tl.load(of + LENGTH), tl.load(of + COUNT)
        # Since then, a part of the draft has been committed, and the last token.
        new = tl.load(before + sequence * width + LENGTH) + at
        token = tl.load(of + TOKENS + 2 + at, mask=new < length - 1, other=0)
        token = tl.where(new < length - 1, token, tl.load(of + TOKENS + 1))
        tl.store(text + new, token, mask=new < length)
        tl.debug_barrier()  # what was added can be read
        last = tl.load(text + length - 1)
        second = tl.load(text + tl.maximum(length - 2, 0))  # of fewer tokens, compared with none
        third = tl.load(text + tl.maximum(length - 3, 0))
        best = tl.zeros((MANY,), tl.int64)
        for start in range(1, length, MANY):
            after = (start + tl.arange(0, MANY)).to(tl.int64)
            one = tl.load(text + after - 1, mask=after < length, other=-2) == last
            two = one & (tl.load(text + after - 2, mask=(after > 1) & (after < length), other=-2) == second)
            three = two & (tl.load(text + after - 3, mask=(after > 2) & (after < length), other=-2) == third)
            matched = one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)
            best = tl.maximum(best, tl.where(one, matched * _MOST + after, 0))
        found = tl.max(best, 0)  # of the longest match, the latest
        begin, count = found % _MOST, tl.where(found > 0, count, 0)
        token = tl.load(text + begin + at % (length - begin), mask=at < count, other=0)
        tl.store(of + TOKENS + 2 + at, token, mask=at < count)
        tl.store(of + COUNT, count)


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
        texts = () if asked.texts is None else _texts(asked.texts, (asked.turns - 1) * (1 + limits.drafted))
        self.known, self._limits, *self._texts = sent_together((known, bounds, *texts), device)
        self._before = self.known
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

    def look_up(self) -> None:
        """Draft what followed the last tokens of each sequence where its own text had them before."""
        texts, begins = self._texts
        _look_up[(len(begins),)](
            *(texts, begins, self.known, self._before, self.known.shape[1], self._rows, _MANY), **OPTIONS
        )

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


def _texts(texts: Sequence[Sequence[int]], more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return texts one after the other, int64, with room for `more` tokens, int64 [texts], and where each begins."""
    lengths = np.array(list(map(len, texts)), np.int64)
    ends = (lengths + more).cumsum()
    found, begins = np.zeros(int(ends[-1]), np.int64), ends - lengths - more
    for text, begin in zip(texts, begins.tolist(), strict=True):
        found[begin : begin + len(text)] = text
    return found, begins


def _counts(limits: Limits, lengths: np.ndarray) -> np.ndarray:
    """Return how many tokens sequences of these lengths draft."""
    found: np.ndarray = np.clip(limits.reach - lengths, 0, limits.drafted)
    return found
