"""The loop: admit, draft, pass, verify, roll back. One `step` is one round of all live sequences.

Knows sequences and passes; knows neither text files nor how a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from detgen.drafters.fast_path import FastPath
from detgen.drafters.protocol import Draft, Drafter
from detgen.engine.forward import Forward
from detgen.engine.request import TokenLogprobs, TokenRecord
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.engine.verification import Verdict, record, verify
from detgen.kernels.packing import Shapes, Window
from detgen.kernels.sampling import choose, leads, scores


class Trace(Protocol):
    """Sees the canonical values behind what is committed; for proofs and tests."""

    def committed(self, seq: Sequence, first: int, logits: torch.Tensor) -> None:
        """float32 [n, vocabulary] logits behind committed tokens first, first + 1, ... of the completion.

        Those of a sequence that is not deterministic are the fast path's from its second token on.
        """
        ...

    def finished(self, seq: Sequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """[layers, cached positions, kv_heads * head_size] of a sequence that is done."""
        ...


class Decoding:
    """Runs live sequences to their ends.

    Args:
        target: canonical passes.
        shapes: what they are held to.
        scheduler: slots and rows.
        stopping: where sequences end.
        stats: counters to keep.

    Attributes:
        drafter: who drafts; None for nobody.
        draft_length: most tokens drafted a round.
        fast: the fast path; set, like the drafter, before the first step.
        verified: told sequence, drafter, accepted tokens and those tried (accepted or corrected) of each draft.
        trace: sees canonical values; None for nobody.
    """

    def __init__(
        self,
        target: Forward,
        shapes: Shapes,
        scheduler: Scheduler,
        stopping: Stopping,
        stats: EngineStats,
    ) -> None:
        self._target = target
        self._shapes = shapes
        self._scheduler = scheduler
        self._stopping = stopping
        self._stats = stats
        self.drafter: Drafter | None = None
        self.draft_length = 0
        self.fast: FastPath | None = None
        self.verified: Callable[[Sequence, str, int, int], None] | None = None
        self.trace: Trace | None = None
        self._done: list[Sequence] = []

    def step(self) -> list[Sequence]:
        """One round.

        Returns:
            The sequences that finished in it; their slots are free again.
        """
        self._scheduler.admit()
        live = list(self._scheduler.live.values())
        self._stats.live = len(live)
        self._stats.peak_live = max(self._stats.peak_live, len(live))
        drafting = [s for s in live if s.generated and s.deterministic]
        drafts = self._draft(drafting)
        if self.riders() and self.fast is not None and not (self._drafts_by_fast_path and drafting):
            self.fast.decode([])
        windows = [
            Window(s.slot, len(s.tokens) - 1, [s.tokens[-1], *drafts[s.slot].tokens], len(drafts[s.slot].tokens) + 1)
            for s in drafting
        ]
        for batch in self._scheduler.pack(windows):
            logits = self._target.run(batch, self._shapes)
            self._verify(batch, logits, drafts)
        done, self._done = self._done, []
        return done

    @property
    def _drafts_by_fast_path(self) -> bool:
        return self.drafter is not None and self.drafter.name == "self"

    def riders(self) -> list[Sequence]:
        """Live sequences that are never verified and have read their prompt."""
        return [s for s in self._scheduler.live.values() if s.generated and not s.deterministic]

    def _draft(self, seqs: list[Sequence]) -> dict[int, Draft]:
        """The draft of each sequence, by slot."""
        if self.drafter is None or not seqs:
            return {s.slot: _NO_DRAFT for s in seqs}
        # The pass commits one token more than it accepts, so the last token before the limit is never drafted.
        lengths = [max(min(self.draft_length, s.room - 1), 0) for s in seqs]
        drafts = self.drafter.draft(seqs, lengths)
        return {s.slot: draft for s, draft in zip(seqs, drafts, strict=True)}

    def _verify(self, batch: list[Window], logits: torch.Tensor, drafts: dict[int, Draft]) -> None:
        """Commit what the canonical logits say of each window, roll back the rest."""
        judged = [(w, self._scheduler.live[w.slot]) for w in batch]
        choices = [choice for w, seq in judged for choice in seq.choices(w.logits)]
        if not choices:
            for w, seq in judged:
                self._read(w, seq)
            return
        score = scores(logits, choices)
        picked = choose(score)
        tokens = picked.tolist()
        rows: list[int] = []
        verdicts = []
        row = 0
        for w, seq in judged:
            if seq.generated == 0:
                self._read(w, seq)
            if not w.logits:
                continue
            drafted, name = drafts.get(w.slot, _NO_DRAFT)
            pending: list[int] = []

            def ends(token: int, seq: Sequence = seq, pending: list[int] = pending) -> bool:
                pending.append(token)
                return self._stopping.ends(seq, pending)

            verdict = verify(drafted, tokens[row : row + w.logits], ends)
            verdicts.append((seq, verdict, drafted, name, row))
            rows += range(row, row + len(verdict.tokens))
            row += w.logits
        committed, chosen, margins = _judge(logits, score, picked, rows)
        at = 0
        for seq, verdict, drafted, name, row in verdicts:
            n = len(verdict.tokens)
            self._trace(seq, logits[row : row + n])
            self._keep_logprobs(seq, committed[at : at + n], chosen[at : at + n])
            if seq.deterministic:
                record(seq, verdict, drafted, name, chosen[at : at + n], margins[at : at + n])
                self._count(seq, verdict, len(drafted), name)
            else:
                self._record_unverified(seq, verdict.tokens[0], chosen[at], margins[at])
            at += n
            self._stats.tokens += n
            self._scheduler.advance(seq, len(seq.tokens) - 1)
            self._finish(seq)

    def _read(self, window: Window, seq: Sequence) -> None:
        """Count a chunk of a prompt."""
        self._stats.prompt_tokens += len(window.tokens)
        self._scheduler.advance(seq, window.start + len(window.tokens))

    def commit_riders(self, logits: torch.Tensor) -> None:
        """Commit one token of the fast path for each rider; logits float32 [riders, vocabulary]."""
        riders = self.riders()
        score = scores(logits, [s.choice() for s in riders])
        picked = choose(score)
        logprobs, chosen, margins = _judge(logits, score, picked, list(range(len(riders))))
        for i, (seq, token, margin) in enumerate(zip(riders, picked.tolist(), margins, strict=True)):
            self._stopping.ends(seq, [token])
            self._trace(seq, logits[i : i + 1])
            self._keep_logprobs(seq, logprobs[i : i + 1], chosen[i : i + 1])
            self._record_unverified(seq, token, chosen[i], margin)
            self._stats.tokens += 1
            self._scheduler.advance(seq, len(seq.tokens) - 1)
            self._finish(seq)

    def _record_unverified(self, seq: Sequence, token: int, logprob: float, margin: float) -> None:
        lead = margin if margin != float("inf") else None
        seq.records.append(TokenRecord(seq.generated, seq.rounds, token, "fast", None, "unverified", logprob, lead))
        seq.tokens.append(token)
        seq.rounds += 1
        self._stats.of("fast").unverified += 1
        self._stats.of("fast").rounds += 1

    def _count(self, seq: Sequence, verdict: Verdict, drafted: int, name: str) -> None:
        """Add a round of a sequence to the counters."""
        stats = self._stats.of(name)
        stats.rounds += 1
        stats.drafted += drafted
        stats.accepted += verdict.accepted
        stats.rolled_back += len(verdict.rolled_back)
        last = verdict.statuses[-1]
        if last != "accepted":
            setattr(stats, last, getattr(stats, last) + 1)
        if self.verified is not None and drafted:
            self.verified(seq, name, verdict.accepted, verdict.tried)

    def _keep_logprobs(self, seq: Sequence, logprobs: torch.Tensor, chosen: list[float]) -> None:
        wanted = seq.request.params.logprobs
        if wanted is None:
            return
        # Sorted, not topk: equal values stand in the order of their ids.
        values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        for i, own in enumerate(chosen):
            top = zip(ids[i, :wanted].tolist(), values[i, :wanted].tolist(), strict=True)
            seq.logprobs.append(TokenLogprobs(own, tuple(top)))

    def _trace(self, seq: Sequence, logits: torch.Tensor) -> None:
        if self.trace is not None:
            self.trace.committed(seq, seq.generated, logits)

    def _finish(self, seq: Sequence) -> None:
        if seq.finish_reason is None:
            return
        seq.text = self._stopping.text(seq)
        if self.trace is not None and seq.deterministic:
            self.trace.finished(seq, *self._target.cache.entries(seq.slot, 0, seq.cached))
        self._scheduler.release(seq)
        self._done.append(seq)


_NO_DRAFT = Draft([], "none")


def _judge(
    logits: torch.Tensor, score: torch.Tensor, picked: torch.Tensor, rows: list[int]
) -> tuple[torch.Tensor, list[float], list[float]]:
    """Log-probabilities float32 [rows, vocabulary] of some rows, those of their chosen tokens, and their margins."""
    at = torch.tensor(rows, device=logits.device)
    best = picked.index_select(0, at)
    own = logits.index_select(0, at)
    logprobs = torch.log_softmax(own, dim=-1)
    chosen: list[float] = logprobs.gather(-1, best[:, None])[:, 0].tolist()
    margins: list[float] = leads(own if score is logits else score.index_select(0, at), best).tolist()
    return logprobs, chosen, margins
