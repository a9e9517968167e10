"""The loop: admit, draft, pass, verify, roll back. One `step` is one round of all live sequences.

Knows sequences and passes; knows no files and no models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from detgen.drafters.protocol import Draft, Drafter
from detgen.drafters.self import FastPath
from detgen.engine.logprobs import token_logprobs
from detgen.engine.request import TokenRecord
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import DrafterStats, EngineStats
from detgen.engine.stopping import Stopping
from detgen.engine.verification import Verdict, record, verify
from detgen.kernels.judging import judge_rows
from detgen.kernels.sampling import choose
from detgen.passes.forward import Forward
from detgen.passes.packing import Shapes, Window

_NO_DRAFT = Draft([], "none")


class Trace(Protocol):
    """Sees the canonical values that tokens are committed from; for proofs and tests."""

    def committed(self, seq: Sequence, first: int, logits: torch.Tensor) -> None:
        """Logits float32 [n, vocabulary] of the completion's tokens first, first + 1, ..., about to be committed.

        Those of an unverified request may be the fast path's from its second token on.
        """
        ...

    def finished(self, seq: Sequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """KV entries [layers, cached positions, kv_heads * head_size] of a finished sequence."""
        ...


class Decoding:
    """Runs sequences round by round until they end.

    Args:
        target: canonical passes.
        shapes: the shapes of canonical passes.
        fast: passes of the fast path.
        scheduler: assigns slots and rows.
        stopping: decides where sequences end.
        stats: counters to update.

    Attributes:
        fast: the fast path.
        trace: sees canonical values; None for no trace.
    """

    def __init__(
        self,
        target: Forward,
        shapes: Shapes,
        fast: Forward,
        scheduler: Scheduler,
        stopping: Stopping,
        stats: EngineStats,
    ) -> None:
        self.fast = FastPath(fast, self.unverified, partial(self.commit, drafts={}))
        self.trace: Trace | None = None
        self._target = target
        self._shapes = shapes
        self._scheduler = scheduler
        self._stopping = stopping
        self._stats = stats
        self._drafter: Drafter | None = None
        self._draft_tokens = 0
        self._learn: Callable[[Sequence, str, int, int], None] | None = None

    def draft_with(self, drafter: Drafter | None, draft_tokens: int) -> None:
        """Set the drafter.

        Args:
            drafter: the drafter; None for no drafts.
            draft_tokens: most draft tokens per sequence and round, unless the drafter has a `draft_tokens` of its own.
        """
        self._drafter = drafter
        most = getattr(drafter, "draft_tokens", draft_tokens)
        self._draft_tokens = min(most, self._shapes.most_rows - 1)  # a window is verified in one pass
        self._learn = getattr(drafter, "learn", None)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Run one round.

        Returns:
            The sequences that finished in it; their slots are free again.
        """
        self._scheduler.admit()
        live = list(self._scheduler.live.values())
        self._stats.live = len(live)
        self._stats.peak_live = max(self._stats.peak_live, len(live))
        drafting = [s for s in live if s.generated and s.deterministic]
        passes = self.fast.passes
        drafts = self._draft(drafting)
        windows = [
            Window(s.slot, len(s.tokens) - 1, [s.tokens[-1], *drafts[s.slot].tokens], len(drafts[s.slot].tokens) + 1)
            for s in drafting
        ]
        if not drafting:
            self.fast.decode([])
        elif self.fast.passes == passes:  # else they got their tokens while the fast path drafted
            windows += [Window(s.slot, len(s.tokens) - 1, s.tokens[-1:], 1) for s in self.unverified()]
        for planned in self._scheduler.passes(windows):
            batch = [w for w in planned if w.slot in self._scheduler.live]  # others broke off in the round's last pass
            if not batch:
                continue
            broken: list[int] = []
            logits = self._target.run(batch, self._shapes, broken)
            self.commit(batch, logits, drafts, broken)
        return [s for s in live if s.finish_reason is not None]

    def unverified(self) -> list[Sequence]:
        """Live sequences of unverified requests that have read their prompt."""
        return [s for s in self._scheduler.live.values() if s.generated and not s.deterministic]

    def _draft(self, seqs: list[Sequence]) -> dict[int, Draft]:
        """The draft of each sequence, by slot."""
        if self._drafter is None or not seqs:
            return {s.slot: _NO_DRAFT for s in seqs}
        # The pass commits one more token than it accepts, so the last token before the limit is never drafted.
        lengths = [max(min(self._draft_tokens, s.remaining - 1), 0) for s in seqs]
        drafts = self._drafter.draft(seqs, lengths)
        return {s.slot: draft for s, draft in zip(seqs, drafts, strict=True)}

    def commit(
        self, batch: list[Window], logits: torch.Tensor, drafts: dict[int, Draft], broken: list[int] | None = None
    ) -> None:
        """Choose and commit tokens for each window; roll back the rest.

        A sequence ends with an error at the first of its rows whose results are not finite. One of a draft token that
        is not committed does not count, so that the error depends on the request alone.

        Args:
            batch: the windows of a canonical pass, or those of unverified requests in a pass of the fast path.
            logits: float32 [sum of the windows' `logits`, vocabulary] of the pass; overwritten.
            drafts: the drafts of the round, by slot.
            broken: rows of the pass whose hidden states are not finite; None if none reads a prompt.
        """
        judged = [(w, self._scheduler.live[w.slot]) for w in batch]
        self._read(judged, broken or [])
        started = time.perf_counter()
        choices = [seq.choice(i, drafts.get(w.slot, _NO_DRAFT).tokens) for w, seq in judged for i in range(w.logits)]
        if not choices:
            return
        picked = choose(logits, choices)
        # Of a row that is not finite, the chosen logit is not finite either.
        finite = logits.gather(-1, picked.tokens[:, None])[:, 0].isfinite()
        tokens = picked.tokens.where(finite, -1).tolist()
        self._target.cost.choose(len(choices), time.perf_counter() - started)
        rows: list[int] = []
        verdicts = []
        row = 0
        for w, seq in judged:
            if not w.logits:
                continue
            drafted, name = drafts.get(w.slot, _NO_DRAFT)
            verdict = self._verdict(w, seq, drafted, tokens[row : row + w.logits])
            committed = range(row, row + len(verdict.tokens) if verdict else row)
            row += w.logits
            if verdict is None:
                self._finish(seq)
                continue
            verdicts.append((seq, verdict, drafted, name))
            if self.trace is not None:
                self.trace.committed(seq, seq.generated, logits[committed.start : committed.stop])
            rows += committed
        if not rows:
            return
        full = any(seq.request.params.logprobs is not None for seq, _, _, _ in verdicts)
        judged_rows = judge_rows(logits, picked, None if len(rows) == len(logits) else np.array(rows), full)
        chosen = judged_rows.chosen.tolist()
        margins = [None if math.isinf(margin) else margin for margin in judged_rows.margins.tolist()]
        at = 0
        for seq, verdict, drafted, name in verdicts:
            n = len(verdict.tokens)
            part = slice(at, at + n)
            if (wanted := seq.request.params.logprobs) is not None and judged_rows.logprobs is not None:
                seq.logprobs += token_logprobs(judged_rows.logprobs[part], chosen[part], wanted)
            if seq.deterministic:
                record(seq, verdict, drafted, name, chosen[part], margins[part])
                self._count(seq, name, _counts(verdict, len(drafted)))
                if drafted and self._learn is not None:
                    self._learn(seq, name, verdict.accepted, verdict.tried)
            else:
                (token,) = verdict.tokens
                seq.records.append(
                    TokenRecord(seq.generated, seq.rounds, token, "fast", None, "unverified", chosen[at], margins[at])
                )
                seq.tokens.append(token)
                seq.rounds += 1
                self._count(seq, "fast", DrafterStats(rounds=1, unverified=1))
            at += n
            self._stats.tokens += n
            self._scheduler.advance(seq, len(seq.tokens) - 1)
            self._finish(seq)

    def _read(self, judged: list[tuple[Window, Sequence]], broken: list[int]) -> None:
        """Note which chunks of prompts were read; break those off that have a broken row whose logits nobody wants."""
        row = 0
        for w, seq in judged:
            end = row + len(w.tokens)
            if not seq.generated:
                self._stats.prompt_tokens += len(w.tokens)
                at = next((i for i in broken if row <= i < end - w.logits), None)
                if at is None:
                    self._scheduler.advance(seq, w.start + len(w.tokens))
                else:
                    self._scheduler.advance(seq, w.start + at - row)
                    seq.break_off(w.start + at - row)
                    if not w.logits:
                        self._finish(seq)
            row = end

    def _verdict(self, window: Window, seq: Sequence, drafted: list[int], chosen: list[int]) -> Verdict | None:
        """The verdict on a draft; None if the sequence ends with an error.

        Args:
            window: the window.
            seq: its sequence, which may have ended while its prompt was read.
            drafted: the draft.
            chosen: the choices of the rows with logits, negative where these are not finite.
        """
        if seq.finish_reason is not None:
            return None
        sound = next((i for i, token in enumerate(chosen) if token < 0), len(chosen))
        verdict = verify(drafted, chosen[:sound], partial(self._stopping.ends, seq)) if sound else None
        reached = verdict is None or (verdict.accepted == sound and seq.finish_reason is None)
        if sound == len(chosen) or not reached:
            return verdict
        position = window.start + len(window.tokens) - window.logits + sound
        self._scheduler.advance(seq, min(position, len(seq.tokens)))
        seq.break_off(position)
        return None

    def _count(self, seq: Sequence, name: str, counts: DrafterStats) -> None:
        """Add the counts of a round to the sequence's and to the engine's."""
        seq.drafts[name].add(counts)
        self._stats.drafters[name].add(counts)

    def _finish(self, seq: Sequence) -> None:
        if seq.finish_reason is None:
            return
        seq.text = self._stopping.text(seq)
        if seq.error is None and self.trace is not None and seq.deterministic:
            self.trace.finished(seq, *self._target.cache.entries(seq.slot, 0, seq.cached))
        self._scheduler.release(seq)


def _counts(verdict: Verdict, drafted: int) -> DrafterStats:
    """The counts of one verdict on `drafted` draft tokens."""
    counts = DrafterStats(1, drafted, verdict.accepted, rolled_back=len(verdict.rolled_back))
    if (last := verdict.statuses[-1]) != "accepted":
        setattr(counts, last, 1)
    return counts
