"""The loop: admit, draft, run, verify, commit, roll back. One `step` is one round of all live sequences.

Knows sequences and passes; knows no files and no models. How much a round attempts is decided in `policy`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np

from detgen.drafters.protocol import Drafter, DraftPlan
from detgen.engine.foreseen import Call, foresee
from detgen.engine.mask_making import MaskMaker
from detgen.engine.output_processing import OutputProcessor
from detgen.engine.pass_results import Ran, WantedRows
from detgen.engine.policy import Policy
from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.rounds_ahead import Ahead, results, rounds_ahead
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.kernels.input_batch import Ends, Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.sampling import Choices
from detgen.program.arrays import Array
from detgen.runner.drafted_rounds import run_rounds
from detgen.runner.model_runner import ModelRunner


class _Drafts(NamedTuple):
    """The drafts of a round.

    Attributes:
        counts: int64 [slots that decode], tokens of each.
        tokens: int64 [sum of counts].
        drafters: int64 [slots], who drafted them: indexes into the log's names.
    """

    counts: np.ndarray
    tokens: np.ndarray
    drafters: np.ndarray


class Decoding:
    """Runs sequences round by round until they end.

    Args:
        target: canonical passes.
        scheduler: assigns slots and rows.
        stopping: decides where sequences end.
        stats: counters to update.
        drafter: proposes tokens.
        draft_tokens: maximum number of draft tokens per sequence and round, unless the drafter sets its own.
        vocabulary: number of the target's tokens.
        ahead: reads the prompts of a thinking model; None if the target does not think.

    Attributes:
        committing: commits the results of passes.
    """

    def __init__(
        self,
        target: ModelRunner,
        scheduler: Scheduler,
        stopping: Stopping,
        stats: EngineStats,
        drafter: Drafter,
        draft_tokens: int,
        vocabulary: int,
        ahead: ReadingAhead | None = None,
    ) -> None:
        self.committing = OutputProcessor(target.cache, target.cost, scheduler, stopping, stats, drafter, ahead)
        self._target = target
        self._scheduler = scheduler
        self._stats = stats
        self._thinking = None if ahead is None else ahead.thinking
        self._drafter, self._vocabulary = drafter, vocabulary
        self._masks = MaskMaker(scheduler.live, every=target.device.type == "cuda")
        self._policy = Policy(drafter, drafter.draft_tokens or draft_tokens, target)

    def step(self) -> list[Sequence]:
        """Run one round.

        Returns:
            The sequences that finished; their slots are free again.
        """
        scheduler, live, stats, policy = self._scheduler, self._scheduler.live, self._stats, self._policy
        started, before = time.perf_counter(), stats.tokens

        scheduler.admit()
        reading = bool(len(live.still_reading()))
        draft_tokens, passes = policy.draft_tokens(live), policy.chain_length(live)
        rounds = 0 if self.committing.seen else policy.rounds(live)
        scheduler.reserve(max(rounds * (1 + draft_tokens) - 1, draft_tokens, passes - 1))
        stats.live, stats.peak_live = len(live), max(stats.peak_live, len(live))

        slots = live.decoding()
        drafts = self._draft(slots, draft_tokens, rounds)
        asked = int(live.verified[slots].sum())

        made = 0
        for ran in self._run(slots, drafts, passes):
            made += 1
            verified = self.committing.verify(ran)
            if verified is not None:
                self.committing.commit(verified)
                self.committing.roll_back(verified)

        ended, tokens = self.committing.finish(), stats.tokens - before
        if asked and tokens and not reading and not (ended and drafts is None):
            turns = made if isinstance(drafts, Ahead) else 1
            seconds = (time.perf_counter() - started) / turns
            for _ in range(turns):
                self._drafter.timed(tokens / len(slots) / turns, seconds, asked)
        return ended

    def _draft(self, slots: np.ndarray, most: int, rounds: int) -> _Drafts | Ahead | None:
        """Return the drafts of slots that decode, at most `most` tokens each; None if there are none.

        Return how a device drafts them in up to `rounds` rounds instead, if it can.
        """
        live = self._scheduler.live
        verified = live.verified[slots]
        asked = slots[verified]
        if not most or not len(asked):
            return None
        # The pass commits one more token than it accepts, so the last token before the limit is never drafted.
        limits = np.minimum(most, live.limit[asked] - live.length[asked] - 1)
        if self._thinking is not None:
            limits = np.minimum(limits, self._thinking.reach(live.length[asked] - 1) - live.length[asked])
        lengths = np.maximum(np.minimum(limits, self._scheduler.room(asked)), 0).tolist()
        ask = self._drafter.plan if rounds else self._drafter.draft
        drafts = ask([live[slot] for slot in asked.tolist()], lengths)
        counts = np.zeros(len(slots), np.int64)
        if isinstance(drafts, DraftPlan):
            counts[verified] = drafts.counts
            return Ahead(drafts, counts, rounds)
        if not any(draft.tokens for draft in drafts):
            return None
        # A custom drafter may return more tokens than there are pages for, or tokens that the target does not have.
        found = [draft._replace(tokens=self._known(draft.tokens[:n])) for draft, n in zip(drafts, lengths, strict=True)]
        counts[verified] = [len(draft.tokens) for draft in found]
        tokens = np.fromiter(chain.from_iterable(draft.tokens for draft in found), np.int64, int(counts.sum()))
        drafters = np.zeros(len(live.busy), np.int64)
        drafters[asked] = [self.committing.log.drafter(draft.drafter) for draft in found]
        return _Drafts(counts, tokens, drafters)

    def _known(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first one that the target does not have."""
        if not tokens or (min(tokens) >= 0 and max(tokens) < self._vocabulary):
            return tokens
        return list(takewhile(lambda token: 0 <= token < self._vocabulary, tokens))

    def _windows(self, slots: np.ndarray, drafts: _Drafts | None) -> Windows:
        """Return a window for each slot: its last committed token and its draft."""
        live = self._scheduler.live
        lengths = np.ones(len(slots), np.int64)
        tokens = live.last[slots]
        if drafts is not None:
            lengths += drafts.counts
            firsts = lengths.cumsum() - lengths
            drafted = np.ones(int(lengths.sum()), bool)
            drafted[firsts] = False
            flat = np.empty(len(drafted), np.int64)
            flat[firsts], flat[drafted] = tokens, drafts.tokens
            tokens = flat
        return Windows(slots, live.length[slots] - 1, lengths, lengths, tokens, lengths - 1)

    def _run(self, slots: np.ndarray, drafts: _Drafts | Ahead | None, most: int) -> Iterator[Ran]:
        """Run a round of slots that decode: up to `most` passes in one call, several rounds, or pass after pass.

        What is yielded is committed before the next is asked for.
        """
        if isinstance(drafts, Ahead):
            yield from self._rounds(self._windows(slots, None), drafts)
            return
        live, committing, windows = self._scheduler.live, self.committing, self._windows(slots, drafts)
        if self._policy.may_chain(live, windows) and self._foreseeable(windows, most):
            call = foresee(self._scheduler, windows, most, goes_on=self._policy.undrafted(live))
            choosing = self._windows(call.slots, None)
            if len(choosing) == len(windows) or self._foreseeable(choosing, most):
                yield self._chain(call, choosing)
                return
        for part in self._scheduler.passes(windows):
            there = live.busy[part.slots]  # the others broke off in an earlier pass
            if self._thinking is not None:  # or thought: what follows must be read with another state
                there &= live.cached[part.slots] == part.starts
            if not there.all():
                part = Windows.of(w for w, wanted in zip(part, there, strict=True) if wanted)
            if len(part):
                broken: list[int] = []
                with self._masks.making(part) as made:
                    choices = committing.chooser(part, made)
                    results = self._target.run(part, broken, scored=committing.plain(part), choices=choices)
                yield Ran(part, results, broken, drafts and drafts.drafters)

    def _rounds(self, windows: Windows, ahead: Ahead) -> Iterator[Ran]:
        """Run rounds in one call, in which the device drafts and continues from what it accepts."""
        committing, plan = self.committing, ahead.plan

        def choices(windows: Windows) -> Choices | None:
            return None if committing.plain(windows) else committing.choices(WantedRows.of(windows), goes_on=True)

        asked = rounds_ahead(self._scheduler, windows, ahead, choices)
        found = run_rounds(self._target, plan.runner or self._target, asked)
        names = committing.log.drafter(plan.drafter), committing.log.drafter(plan.nothing)
        return results(self._scheduler, asked, plan, found, names)

    def _foreseeable(self, windows: Windows, most: int) -> bool:
        """Return whether `most` passes can continue with the choices of these windows before the host has seen them."""
        committing = self.committing
        if committing.plain(windows):
            return True
        return not committing.seen and self._policy.may_foresee(self._scheduler.live, windows.slots, most)

    def _chain(self, call: Call, choosing: Windows) -> Ran:
        """Run passes in one call; in each, a sequence reads the token that it chose in the one before."""
        live, (first, later, reads, slots, lengths) = self._scheduler.live, call
        to_end = live.eos[slots] & (live.length[slots] - live.prompt[slots] >= live.least[slots])
        ends = Ends(live.eos_ids[:, 0].copy(), to_end)
        results: Array | Scores
        if self.committing.plain(choosing):
            tokens, results, broken = self._target.chain(first, lengths, ends, later)
        else:
            choices = self.committing.choices(WantedRows.of(choosing), goes_on=True)
            tokens, results, broken = self._target.sample(first, lengths, choices, ends, later)
        windows = reads.joined(Windows(slots, choosing.starts, lengths, lengths, tokens))
        return Ran(windows, results, broken, chained=True)
