"""The loop: admit, draft, pass, verify, roll back. One `step` is one round of all live sequences.

Knows sequences and passes; knows no files and no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from detgen.drafters.protocol import Drafter
from detgen.drafters.self import FastPath
from detgen.engine.committing import Committing, Rows
from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.kernels.judging import Scores
from detgen.kernels.native.library import Ends
from detgen.passes.forward import Forward
from detgen.passes.packing import Shapes, Windows

# Passes in one call, where nobody drafts; more gain little, and a slot waits for them when its sample ends. A sequence
# that is alone waits for nobody, so there are more of them as long as they are over soon.
_CHAINED, _ALONE = 4, 16
_SOON = 0.01  # seconds
_LOGITS = 1 << 25  # most entries of logits that one call leaves behind


class _Drafts(NamedTuple):
    """The drafts of a round.

    Attributes:
        counts: int64 [sequences], tokens of each.
        tokens: int64 [sum of counts].
        drafters: int64 [slots], whose they are; places in the log's names.
    """

    counts: np.ndarray
    tokens: np.ndarray
    drafters: np.ndarray


class Decoding:
    """Runs sequences round by round until they end.

    Args:
        target: canonical passes.
        shapes: the shapes of canonical passes.
        fast: passes of the fast path.
        scheduler: assigns slots and rows.
        stopping: decides where sequences end.
        stats: counters to update.
        ahead: reads the prompts of a thinking model; None if the target does not think.

    Attributes:
        fast: the fast path.
        committing: what becomes of the passes.
    """

    def __init__(
        self,
        target: Forward,
        shapes: Shapes,
        fast: Forward,
        scheduler: Scheduler,
        stopping: Stopping,
        stats: EngineStats,
        ahead: ReadingAhead | None = None,
    ) -> None:
        self.committing = Committing(target.cache, target.cost, scheduler, stopping, stats, ahead)
        self.fast = FastPath(fast, self.unverified, self.committing.commit)
        self._target = target
        self._shapes = shapes
        self._scheduler = scheduler
        self._stats = stats
        self._thinking = None if ahead is None else ahead.thinking
        self._drafter: Drafter | None = None
        self._draft_tokens = 0
        self._timed: Callable[[int, float, int, bool], None] | None = None

    def draft_with(self, drafter: Drafter | None, draft_tokens: int) -> None:
        """Set the drafter.

        Args:
            drafter: the drafter; None for no drafts.
            draft_tokens: most draft tokens per sequence and round, unless the drafter has a `draft_tokens` of its own.
        """
        self._drafter = drafter
        most = getattr(drafter, "draft_tokens", draft_tokens)
        self._draft_tokens = min(most, self._shapes.most_rows - 1)  # a window is verified in one pass
        self.committing.learn = getattr(drafter, "learn", None)
        self._timed = getattr(drafter, "timed", None)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Run one round.

        Returns:
            The sequences that finished in it; their slots are free again.
        """
        scheduler, live = self._scheduler, self._scheduler.live
        started, tokens = time.perf_counter(), self._stats.tokens
        scheduler.admit()
        reading = bool(len(live.still_reading()))
        chained = self._chained()
        patient = self._patient() or (reading and self._timed is not None)
        scheduler.reserve(max(0 if patient else self._draft_tokens, chained - 1))
        self._stats.live = len(live)
        self._stats.peak_live = max(self._stats.peak_live, len(live))
        slots = live.decoding(verified=True)
        passes = self.fast.passes
        drafts = None if patient else self._draft(slots)
        asked = len(slots)
        if not len(slots):
            self.fast.decode([])
        elif self.fast.passes == passes:  # else they got their tokens while the fast path drafted
            slots = np.concatenate([slots, live.decoding(verified=False)])
        plain = self._windows(slots, drafts)
        if self._patient() and self._may_chain(plain, chained):
            self._chain(plain, chained)
        else:
            self._passes(plain, drafts)
        ended, tokens = self.committing.finish(), self._stats.tokens - tokens
        if self._timed is not None and asked and tokens and not reading and not (ended and drafts is None):
            self._timed(tokens, time.perf_counter() - started, asked, bool(scheduler.waiting))
        return ended

    def _patient(self) -> bool:
        """Whether nobody drafts in this round."""
        return self._drafter is None or getattr(self._drafter, "patient", False)

    def _passes(self, decoding: Windows, drafts: _Drafts | None) -> None:
        """Run the passes of a round, and commit what they choose."""
        live = self._scheduler.live
        for windows in self._scheduler.passes(decoding):
            there = live.busy[windows.slots]  # others broke off in the round's last pass
            if self._thinking is not None:  # or thought, so that what lies behind is to be read with another state
                there &= live.cached[windows.slots] == windows.starts
            if not there.all():
                windows = Windows.of(w for w, wanted in zip(windows, there, strict=True) if wanted)
            if not len(windows):
                continue
            broken: list[int] = []
            results = self._target.run(windows, self._shapes, broken, scored=self.committing.plain(windows))
            self.committing.commit(windows, results, drafts and drafts.drafters, broken)

    def _may_chain(self, windows: Windows, most: int) -> bool:
        """Whether these windows have no drafts, are all that there is to do, and nothing but their logits decides."""
        live = self._scheduler.live
        return (
            self._target.chains
            and 0 < len(windows.tokens) == len(windows) == len(live) <= self._shapes.most_rows
            and bool(live.verified[windows.slots].all())
            and (self.committing.plain(windows) or self._may_sample(windows.slots, most))
        )

    def _may_sample(self, slots: np.ndarray, most: int) -> bool:
        """Whether what these slots choose in so many passes can be foreseen, and there is room for the logits."""
        live, kept = self._scheduler.live, self._target.kept
        asked = live.adjusted[slots].any() or (not kept and live.wordy[slots].any())
        return not self.committing.seen and len(slots) * most * kept <= _LOGITS and not asked

    def _chained(self) -> int:
        """How many passes are run in one call, if any are."""
        live = self._scheduler.live
        if len(live) > 1 or live.watched[live.busy].any():
            return _CHAINED
        return int(min(max(_SOON / max(self._target.cost.predict(1), 1e-9), _CHAINED), _ALONE))

    def _chain(self, windows: Windows, most: int) -> None:
        """Run up to `most` passes in one call, and commit what they choose."""
        live, scheduler, slots = self._scheduler.live, self._scheduler, windows.slots
        left = live.limit[slots] - live.length[slots]
        most = min(most, int(left.min())) if scheduler.waiting else most  # nobody waits for a sample's end
        lengths = np.minimum(np.minimum(left, scheduler.room(slots) + 1), most)
        to_end = live.eos[slots] & (live.length[slots] - live.prompt[slots] >= live.least[slots])
        ends = Ends(live.eos_ids[:, 0].copy(), to_end)
        results: torch.Tensor | Scores
        broken: list[int] = []
        if self.committing.plain(windows):
            tokens, results = self._target.chain(windows, lengths, ends, self._shapes)
        else:
            choices = self.committing.choices(Rows.of(windows))
            tokens, results, broken = self._target.sample(windows, lengths, choices, ends, self._shapes)
        read = Windows(slots, windows.starts, lengths, lengths, tokens)
        self.committing.commit(read, results, broken=broken, chained=True)

    def unverified(self) -> list[Sequence]:
        """Live sequences of unverified requests that have read their prompt, and have a page for their next token."""
        slots = self._scheduler.live.decoding(verified=False).tolist()
        return [self._scheduler.live[slot] for slot in slots if self._scheduler.reserve_next(slot)]

    def _draft(self, slots: np.ndarray) -> _Drafts | None:
        """The drafts of sequences that decode; None if there are none."""
        if self._drafter is None or not len(slots):
            return None
        live = self._scheduler.live
        # The pass commits one more token than it accepts, so the last token before the limit is never drafted.
        most = np.minimum(self._draft_tokens, live.limit[slots] - live.length[slots] - 1)
        if self._thinking is not None:
            most = np.minimum(most, self._thinking.reach(live.length[slots] - 1) - live.length[slots])
        lengths = np.maximum(np.minimum(most, self._scheduler.room(slots)), 0).tolist()
        drafts = self._drafter.draft([live[slot] for slot in slots.tolist()], lengths)
        if not any(draft.tokens for draft in drafts):
            return None
        # There are no pages for more, whatever a custom drafter returns.
        found = [draft._replace(tokens=draft.tokens[:n]) for draft, n in zip(drafts, lengths, strict=True)]
        counts = np.fromiter((len(draft.tokens) for draft in found), np.int64, len(found))
        tokens = np.fromiter(chain.from_iterable(draft.tokens for draft in found), np.int64, int(counts.sum()))
        drafters = np.zeros(len(live.busy), np.int64)
        drafters[slots] = [self.committing.log.drafter(draft.drafter) for draft in found]
        return _Drafts(counts, tokens, drafters)

    def _windows(self, slots: np.ndarray, drafts: _Drafts | None) -> Windows:
        """The last committed token of each slot, and the drafts of the first of them."""
        live = self._scheduler.live
        lengths = np.ones(len(slots), np.int64)
        tokens = live.last[slots]
        if drafts is not None:
            lengths[: len(drafts.counts)] += drafts.counts
            ends = lengths.cumsum()
            firsts = ends - lengths
            drafted = np.ones(int(lengths.sum()), bool)
            drafted[firsts] = False
            flat = np.empty(len(drafted), np.int64)
            flat[firsts], flat[drafted] = tokens, drafts.tokens
            tokens = flat
        return Windows(slots, live.length[slots] - 1, lengths, lengths, tokens)
