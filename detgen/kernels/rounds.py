"""The inputs and results of rounds of drafting and verifying that one call runs before the host sees the first.

A back end that can do this judges drafts itself, but only in order to go on: callers judge again what they commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol

import numpy as np

from detgen.kernels.input_batch import InputBatch, Window, Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.sampling import Choices


class Limits(NamedTuple):
    """How far sequences go in a call. All arrays are int64 [sequences]; lengths are tokens of prompt and completion.

    Attributes:
        drafted: most tokens that each drafts in a round; 0 for a sequence that only takes part in verifying passes.
        reach: the length that a draft may not exceed.
        room: the length for which there are pages; a sequence that outgrows them waits for the next call.
        end: the length at which it ends.
        least: the length up to which no token ends it.
        ending: int64 [sequences, n], tokens that end each; -1 for none.
    """

    drafted: np.ndarray
    reach: np.ndarray
    room: np.ndarray
    end: np.ndarray
    least: np.ndarray
    ending: np.ndarray


class Rounds(NamedTuple):
    """Rounds in which all sequences that decode take part until they end.

    Attributes:
        turns: number of rounds.
        windows: the last token of each sequence, in windows of one token: of those that decode, then of those that
            choose their first token in one of the rounds, and leave it at that.
        prompts: int64 [sequences], tokens of each prompt.
        chunks: what is read of prompts in each round, beside the drafts.
        limits: how far those that decode go.
        choices: how the next token of each is chosen; later ones are chosen in the same way, at their positions. None
            if all take their largest logit.
        reads: what the drafting model reads first, of the sequences that draft, in their order; each wants one row.
        again: number of each sequence's last tokens that it reads in later rounds.
        texts: instead of a model, what drafts are looked up in: prompt and completion of each sequence that decodes,
            which may be empty for one that does not draft. None where a model drafts.
    """

    turns: int
    windows: Windows
    prompts: np.ndarray
    chunks: Sequence[Sequence[Window]]
    limits: Limits
    choices: Choices | None
    reads: Windows
    again: int
    texts: Sequence[Sequence[int]] | None = None

    @property
    def longest(self) -> int:
        """The most positions that a pass of a round may read."""
        limits = self.limits
        grown = self.windows.starts[: len(limits.end)] + 1 + self.turns * (1 + limits.drafted)
        return int(np.minimum(np.minimum(limits.room, limits.end), grown).max())


class Round(NamedTuple):
    """The results of a round, for the sequences that had not ended before it.

    Attributes:
        windows: what its verifying passes read: the last token of each sequence, and its draft; then chunks of prompts.
        which: int64 [n], the sequences of the first windows.
        scores: scores of the rows that are wanted.
        broken: rows with a key of the last layer that is not finite.
    """

    windows: Windows
    which: np.ndarray
    scores: Scores
    broken: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A pass as it is launched in each round: its windows have as many rows as a sequence may have there.

    Attributes:
        batch: its rows as of the first round; those after the first one of each window are placeholders.
        which: int64 [n], the sequences of the first windows. The others have the rows that they have, in one round.
        others: int64 [rows], the sequences of the rows of these others that are wanted.
        column: which token comes first in a window: 0 for the one before the last, 1 for the last.
        step: the number of tokens drafted before; -1 for a pass that verifies.
    """

    batch: InputBatch
    which: np.ndarray
    others: np.ndarray
    column: int
    step: int


class Passes(NamedTuple):
    """The passes of a call.

    Attributes:
        drafting: the passes of a model that draft, round by round, step by step. The very first has all its tokens.
        verifying: the passes that verify, round by round.
    """

    drafting: list[list[Pass]]
    verifying: list[list[Pass]]


class Rounding(Protocol):
    """Runs rounds in one call, whose drafts are a model's on the same device, or looked up there.

    Attributes:
        outputs: entries of a row of logits.
    """

    outputs: int

    def rounds(self, drafting: Any, asked: Rounds, passes: Passes) -> list[Round]:
        """Run all rounds; the host waits once.

        Args:
            drafting: runs the passes that draft, of the same back end; any if there are none.
            asked: the rounds.
            passes: their passes.
        """
        ...


def told(asked: Rounds, passes: Passes, sheets: np.ndarray, scores: Scores, broken: np.ndarray) -> list[Round]:
    """Return what rounds gave.

    Args:
        asked: the rounds.
        passes: their passes.
        sheets: int64 [rounds, sequences, columns], as they were before the verifying passes of each round: the length
            of a sequence, whether it goes on, how many tokens are drafted, its last token but one, its last one, the
            drafted ones.
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
