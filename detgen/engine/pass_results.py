"""The rows of a pass, its results and its committed part, as arrays; log-probabilities that requests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detgen.engine.records import NONE
from detgen.engine.request import TokenLogprobs
from detgen.kernels.input_batch import Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.sampling import Chosen
from detgen.program.arrays import Array


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a pass whose logits are wanted, and their windows; windows without such rows are left out.

    Attributes:
        slots: int64 [windows].
        counts: int64 [windows], rows of each.
        firsts: int64 [windows], the first row of each.
        positions: int64 [windows], the position of that row in its sequence.
        owner: int64 [rows], the window of each row.
        depth: int64 [rows], its place among the window's.
        drafted: int64 [rows], the token that was drafted after it; NONE for the last of each window.
    """

    slots: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    positions: np.ndarray
    owner: np.ndarray
    depth: np.ndarray
    drafted: np.ndarray

    @property
    def single(self) -> bool:
        """Whether every window has one row."""
        return len(self.owner) == len(self.slots)

    def rows_of_pass(self, windows: Windows) -> np.ndarray:
        """Return the indexes of the rows among all rows of the pass with these windows, int64 [rows]."""
        ends = windows.lengths.cumsum()[windows.logits > 0]
        found: np.ndarray = (ends - self.counts)[self.owner] + self.depth
        return found

    @classmethod
    def of(cls, windows: Windows) -> WantedRows:
        """Return the wanted rows of these windows."""
        if len(windows.tokens) == len(windows) == windows.logits.sum():
            every, ones = np.arange(len(windows)), np.ones(len(windows), np.int64)
            drafted = np.full(len(windows), NONE)
            return cls(windows.slots, ones, every, windows.starts, every, ones - 1, drafted)
        asked = windows.logits > 0
        slots, counts, ends = windows.slots[asked], windows.logits[asked], windows.lengths.cumsum()[asked]
        firsts = counts.cumsum() - counts
        owner = np.repeat(np.arange(len(slots)), counts)
        depth = np.arange(len(owner)) - firsts[owner]
        drafted = np.append(windows.tokens, NONE)[(ends - counts)[owner] + depth + 1]
        drafted[firsts + counts - 1] = NONE
        return cls(slots, counts, firsts, (windows.starts + windows.lengths)[asked] - counts, owner, depth, drafted)


@dataclass(frozen=True, slots=True)
class Ran:
    """A canonical pass, or a chain of passes in one call, and its results.

    Attributes:
        windows: the windows of the pass.
        results: logits, float32 [sum of the windows' `logits`, vocabulary], which are overwritten; or their scores, if
            the windows are `plain`.
        broken: rows whose hidden states are not finite.
        drafters: int64 [slots], who drafted; None if there are no drafts.
        chained: whether each row belongs to a pass of its own and read the token that the row before it chose.
        goes_on: whether later rounds of the same call may have written to the pages behind.
    """

    windows: Windows
    results: Array | Scores
    broken: list[int]
    drafters: np.ndarray | None = None
    chained: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """A verified pass.

    Attributes:
        rows: the rows whose logits were wanted.
        results: see `Ran`.
        picked: the choices from logits; None for scores.
        chosen: int64 [rows], the token after each row.
        produced: int64 [rows], tokens of the completion up to and including that token.
        stopped: bool [rows], whether the token is an end-of-sequence token that ends its sequence.
        ends: bool [rows], whether its sequence ends with the token.
        accepted: int64 [windows], accepted draft tokens.
        committed: int64 [windows], committed tokens.
        read: int64 [n], slots that have read their last token and now have the next one.
        drafters: int64 [windows], who drafted: indexes into the log's names.
        chained: see `Ran`.
        goes_on: likewise.
    """

    rows: WantedRows
    results: Array | Scores
    picked: Chosen | None
    chosen: np.ndarray
    produced: np.ndarray
    stopped: np.ndarray
    ends: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    read: np.ndarray
    drafters: np.ndarray
    chained: bool
    goes_on: bool


def token_logprobs(likely: np.ndarray, chosen: Sequence[float] | np.ndarray) -> list[TokenLogprobs]:
    """Return the log-probabilities of the chosen tokens and of the most likely ones.

    Args:
        likely: LIKELY [rows, n], as `most_likely` returns them.
        chosen: log-probability of each row's chosen token.
    """
    tops = zip(likely["token"].tolist(), likely["logprob"].tolist(), strict=True)
    chosen = np.asarray(chosen).tolist()
    return [TokenLogprobs(own, tuple(zip(*top, strict=True))) for own, top in zip(chosen, tops, strict=True)]
