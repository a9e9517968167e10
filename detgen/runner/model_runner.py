"""One pass of a model over a packed bag of windows.

Prefill, plain decode, verification and the draft model all run here; they differ in their rows. Knows token ids, slots
and positions; knows no requests and no files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

import numpy as np

from detgen.kernels.attention import BLOCK
from detgen.kernels.decoder import Chaining, Decoder
from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import MOST_ROWS, Ends, InputBatch, Window, Windows, pack
from detgen.kernels.logprobs import Scores
from detgen.kernels.pass_cost import PassCost, attention_area
from detgen.kernels.penalties import Growing
from detgen.kernels.rounds import Rounding
from detgen.kernels.sampling import Choice, Choices
from detgen.program.arrays import Array
from detgen.runner.kv_cache import KVCache
from detgen.runner.state_cache import MOST_DRAFTED

if TYPE_CHECKING:
    import torch

_Found = TypeVar("_Found")
_MOST_TIMED = 256  # rows of passes that are only timed


class Exchanging(Protocol):
    """Provides the states of slots for the passes of a thinking model, and takes hidden states."""

    def exchange(self, windows: Windows) -> Exchange:
        """Return the states for the rows of a pass."""
        ...

    def note(self, windows: Windows, hidden: torch.Tensor) -> None:
        """Keep the hidden states of the rows of a pass that T reads, float32 [tokens, hidden]."""
        ...


class ModelRunner:
    """Runs packed passes of one model over one KV cache.

    Args:
        decoder: the back end with the model.
        cache: its KV cache.
        group: query heads per KV head.

    Attributes:
        passes: passes run so far.
        rows: rows of these passes.
        cost: cost of the passes and of choosing their tokens.
        thinking: provides the states for passes that are run without an exchange; None if the model does not think.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, group: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = cache.device
        self.cost = PassCost()
        self.passes = self.rows = 0
        self.thinking: Exchanging | None = None
        self._group = group

    def counting(self) -> ModelRunner:
        """Return a runner of the same model, cache, cost and states, with its own counters."""
        other = ModelRunner(self.decoder, self.cache, self._group)
        other.cost, other.thinking = self.cost, self.thinking
        return other

    def by(self, decoder: Decoder) -> ModelRunner:
        """Return a runner of another decoder over the same cache and states, with its own cost and counters."""
        other = ModelRunner(decoder, self.cache, self._group)
        other.thinking = self.thinking
        return other

    @property
    def concurrent(self) -> bool:
        """Whether several threads may run passes at once; not where passes keep states."""
        return self.thinking is None and self.cache.states is None and self.decoder.concurrent

    @property
    def chaining(self) -> Chaining | None:
        """Runs several passes in one call; None where that is impossible now."""
        return None if self.thinking is not None else self.decoder.chaining

    @property
    def rounding(self) -> Rounding | None:
        """Runs several rounds in one call; None where that is impossible."""
        return self.decoder.rounding if self.thinking is None and self.rewinds else None

    @property
    def rewinds(self) -> bool:
        """Whether the rows of any number of passes can be rolled back; states cannot go back that far."""
        return self.cache.states is None

    @property
    def most_drafted(self) -> int:
        """Maximum number of draft tokens in a window."""
        return MOST_ROWS - 1 if self.cache.states is None else MOST_DRAFTED

    def pack(self, windows: Windows, later: Sequence[Windows] = ()) -> InputBatch:
        """Pack the rows of a pass; `later` are the windows that join in the following passes of the same call."""
        states, spans = self.cache.states, None
        if states is not None:
            states.reach(1 + max((int(w.slots.max()) for w in later if len(w)), default=0))
            spans = states.spans(windows)
        return pack(windows, self.cache.pages.tables, self._group, spans, later)

    def learn_cost(self, slots: int) -> None:
        """Time passes of one row and of `slots` rows, a few hundred at most, to know the cost before it is needed.

        Clears the cache.
        """
        slots = min(slots, _MOST_TIMED, self.cache.pages.count)
        self.cache.pages.lay_out(slots, BLOCK)
        for timed in range(4):
            for rows in (1, slots):
                self.run([Window(slot, 0, [0], 1) for slot in range(rows)])
            if not timed:
                self.cost = PassCost()  # the first passes include one-time work

    @overload
    def run(
        self,
        windows: Windows | Sequence[Window],
        broken: list[int] | None = None,
        exchange: Exchange | None = None,
    ) -> Array: ...

    @overload
    def run(
        self,
        windows: Windows | Sequence[Window],
        broken: list[int] | None = None,
        *,
        scored: bool,
        choices: Callable[[], Choices] | None = None,
    ) -> Array | Scores: ...

    def run(
        self,
        windows: Windows | Sequence[Window],
        broken: list[int] | None = None,
        exchange: Exchange | None = None,
        *,
        scored: bool = False,
        choices: Callable[[], Choices] | None = None,
    ) -> Array | Scores:
        """Run one pass: write the windows' KV entries and return the logits they want.

        Args:
            windows: at most one per slot.
            broken: receives, ascending, the rows whose hidden states before the last layer are not finite, as the keys
                of the last layer show. What the last layer itself breaks shows in the logits.
            exchange: provides a state for each token of the windows, and takes their hidden states.
            scored: whether only the largest logits are needed.
            choices: returns how the rows' tokens are chosen, if only these tokens are needed.

        Returns:
            Logits, float32 [sum of the windows' `logits`, vocabulary], in the order of the windows. The rows' scores
            instead if only chosen tokens are needed and the decoder finds them without storing all logits.
        """
        started = time.perf_counter()
        if not isinstance(windows, Windows):
            windows = Windows.of(windows)
        batch = self.pack(windows)
        self.passes += 1
        self.rows += len(batch.ids)
        if exchange is None and self.thinking is not None:
            exchange = self.thinking.exchange(windows)
        results = self.decoder.run(batch, exchange, broken, scored=scored, choices=choices)
        if self.cache.states is not None:
            self.cache.states.move(windows)
        if exchange is not None and exchange.hidden is not None and self.thinking is not None:
            self.thinking.note(windows, exchange.hidden)
        self.cost.update(len(batch.ids), time.perf_counter() - started, float(batch.area))
        return results

    def chain(
        self, windows: Windows, lengths: np.ndarray, ends: Ends | None = None, later: Sequence[Windows] = ()
    ) -> tuple[np.ndarray, Scores, list[int]]:
        """Run consecutive passes in one call: each sequence continues with the token of its largest logit.

        Results are those of `run` with `scored` for the same rows. Entries are written for all tokens but the last one
        that a sequence chooses.

        Args:
            windows: the windows of the first pass, which want one row each, or none.
            lengths: int64 [windows that want a row], number of passes that each takes part in, its own included, at
                least 1; lowered where results are not finite, and where a sequence ends. The pages of its slot must
                reach to the last of them.
            ends: where sequences end; None for nowhere.
            later: windows of the same form that join in each of the following passes; only where the decoder `reads`.

        Returns:
            The token that each row read (the last one of its window, or what the row before chose), int64 [sum of
            lengths], in the order of the windows; the rows' scores; and the broken rows (`Chaining`). A row whose last
            keys are not finite counts as not finite.
        """
        batch = self.pack(windows, later)
        scores, broken = self._chained(batch, lengths, lambda of: of.chain(batch, lengths, ends))
        return _read(batch, lengths, scores.tokens), scores, broken

    def sample(
        self,
        windows: Windows,
        lengths: np.ndarray,
        choices: Choices,
        ends: Ends | None = None,
        later: Sequence[Windows] = (),
    ) -> tuple[np.ndarray, Array | Scores, list[int]]:
        """Run consecutive passes in one call: each sequence continues with its likely choice.

        Where the true choice is another token, the rows after it have read a wrong token.

        Args:
            windows: see `chain`.
            lengths: see `chain`; also lowered where the choice cannot be known.
            choices: how the first token of each is chosen; later ones are chosen in the same way, at their positions.
            ends: see `chain`.
            later: see `chain`.

        Returns:
            The token that each row read, int64 [sum of lengths], in the order of the windows; the rows' logits, or
            their scores where the decoder keeps no logits; and the broken rows (`Chaining`).
        """
        batch = self.pack(windows, later)
        chosen, rows, broken = self._chained(batch, lengths, lambda of: of.sample(batch, lengths, choices, ends))
        return _read(batch, lengths, chosen), rows, broken

    def draft(
        self,
        windows: Windows,
        lengths: np.ndarray,
        choices: Sequence[Choice],
        growing: Sequence[Growing | None] | None = None,
    ) -> list[list[int]]:
        """Return the likely next choices of each sequence; arguments as for `sample`, adjustments in `growing`."""
        batch, how = self.pack(windows), replace(Choices.of(choices), adjustments=None, growing=growing)
        return self._chained(batch, lengths, lambda of: of.draft(batch, lengths, how))

    def _chained(self, batch: InputBatch, lengths: np.ndarray, call: Callable[[Chaining], _Found]) -> _Found:
        """Run several passes by one call, count those that ran, and return the call's result."""
        chaining = self.chaining
        assert chaining is not None, "asked before"
        started, asked = time.perf_counter(), lengths.copy()
        found = call(chaining)
        if self.cache.states is not None:
            for windows in (batch.windows, *batch.later):
                self.cache.states.move(windows)
            self.cache.states.move(batch.choosing[0], lengths - 1)
        self._count(batch, lengths if chaining.stops else asked, time.perf_counter() - started)
        return found

    def _count(self, batch: InputBatch, lengths: np.ndarray, seconds: float) -> None:
        """Count the passes of one call, and learn their costs from its time, shared out as the costs predict.

        `lengths` are those that ran.
        """
        known = (batch.windows, *batch.later)
        lasts, begins = batch.choosing
        steps = np.arange(max(len(known), int((begins + lengths).max(initial=0))))
        depth = steps[:, None] - begins
        goes = (depth > 0) & (depth < lengths)
        rows, keys = goes.sum(1), (goes * (lasts.starts + 1 + depth)).sum(1)
        rows[: len(known)] += [len(w.tokens) for w in known]
        keys[: len(known)] += [int((w.starts + w.lengths).sum()) for w in known]
        areas = attention_area(rows, keys)
        times = seconds * self.cost.shares(rows, areas)
        self.passes += len(rows)
        self.rows += int(rows.sum())
        for count, time_of, area in zip(rows.tolist(), times.tolist(), areas.tolist(), strict=True):
            self.cost.update(count, time_of, area)


def _read(batch: InputBatch, lengths: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return what each row of consecutive passes read: the last token of its window, or what the row before chose."""
    tokens = np.empty_like(chosen)
    tokens[1:] = chosen[:-1]
    tokens[lengths.cumsum() - lengths] = batch.choosing[0].tokens
    return tokens
