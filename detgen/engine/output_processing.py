"""Processes the results of a pass: chooses tokens, judges drafts, writes records; commits, rolls back, ends sequences.

Whatever concerns all rows is one array operation. There are loops only over sequences that ask for more than most: stop
strings, penalties, log-probabilities, drafts. Knows no files and no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from detgen.drafters.protocol import Drafter
from detgen.engine.pass_results import Ran, Verified, WantedRows, token_logprobs
from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.records import NONE, Log, count_statuses
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.engine.verification import judge, log_columns
from detgen.kernels.input_batch import Windows
from detgen.kernels.logprobs import Judged, Scores, judge_rows, most_likely, of_tokens
from detgen.kernels.pass_cost import PassCost
from detgen.kernels.penalties import Adjustment, Growing
from detgen.kernels.sampling import Choices, choose
from detgen.program.arrays import Array, array
from detgen.runner.kv_cache import KVCache

_BROKEN = -2  # stands for the choice of a row that is not finite


class Trace(Protocol):
    """Sees the canonical values from which tokens are committed; for proofs and tests.

    Attributes:
        chains: whether passes may share a call and keep only the logits that are needed, as without a trace; then the
            trace sees no logits.
    """

    chains: bool

    def committed(self, seq: Sequence, first: int, logits: Array) -> None:
        """See the logits, float32 [n, vocabulary], of tokens first, first + 1, ... before they are committed."""
        ...

    def finished(self, seq: Sequence, keys: np.ndarray, values: np.ndarray) -> None:
        """See the KV entries [layers, cached positions, kv_heads * head_size] of a finished sequence."""
        ...


class OutputProcessor:
    """Verifies and commits the choices of passes, and rolls back the rest.

    Args:
        cache: the target's KV cache.
        cost: learns what choosing costs.
        scheduler: has the live sequences.
        stopping: decides where sequences end.
        stats: counters to update.
        drafter: learns from each judged draft.
        ahead: reads the prompts of a thinking model; None if the target does not think.

    Attributes:
        log: the acceptance logs of the live sequences.
        trace: sees canonical values; None for no trace.
    """

    def __init__(
        self,
        cache: KVCache,
        cost: PassCost,
        scheduler: Scheduler,
        stopping: Stopping,
        stats: EngineStats,
        drafter: Drafter,
        ahead: ReadingAhead | None = None,
    ) -> None:
        self.log = Log()
        self.trace: Trace | None = None
        self._cache = cache
        self._cost = cost
        self._scheduler = scheduler
        self._stopping = stopping
        self._stats = stats
        self._drafter = drafter
        self._thinking = None if ahead is None else ahead.thinking
        self._ahead = ahead
        self._done: list[Sequence] = []

    @property
    def seen(self) -> bool:
        """Whether a trace sees all logits from which tokens are chosen."""
        return self.trace is not None and not self.trace.chains

    def plain(self, windows: Windows) -> bool:
        """Return whether a canonical pass with these windows only needs to find the largest logits."""
        live, slots = self._scheduler.live, windows.slots[windows.logits > 0]
        asked = live.choosy[slots].any() or live.wordy[slots].any()
        return not self.seen and not asked

    def chooser(self, windows: Windows, ready: Callable[[], None]) -> Callable[[], Choices] | None:
        """Return a function that gives, after `ready`, how the pass chooses tokens; None if it has to give logits."""

        def make() -> Choices:
            ready()
            return self.choices(WantedRows.of(windows))

        return None if self.seen or self.plain(windows) else make

    def verify(self, ran: Ran) -> Verified | None:
        """Choose the token after each row, and compare the drafts with the choices.

        A sequence ends with an error at its first row whose results are not finite. Rows of draft tokens that are not
        committed do not count, so that the error depends on the request alone.

        Returns:
            The committed part; None if nothing is committed.
        """
        windows, results, broken, live = ran.windows, ran.results, ran.broken, self._scheduler.live
        if self._ahead is not None:
            windows, results, broken = self._ahead.settle(live, windows, results, broken, self._stats)
        self._read(windows, broken)
        rows = WantedRows.of(windows)
        if not len(rows.owner):
            return None
        slots = rows.slots[rows.owner]
        started = time.perf_counter()
        if isinstance(results, Scores):
            picked, tokens, finite = None, results.tokens, results.finite.copy()
        else:
            picked = choose(results, self.choices(rows) if live.choosy[rows.slots].any() else None)
            tokens = array(picked.tokens)
            # Of a row that is not finite, the chosen logit is not finite either.
            finite = np.isfinite(of_tokens(results, picked.tokens))
        if broken:  # as for rows of prompts, since a row that decodes now may be read as one another time
            finite &= ~np.isin(rows.rows_of_pass(windows), broken)
        formed = live.formed[rows.slots] & live.busy[rows.slots]
        for i in formed.nonzero()[0].tolist():  # where a mask fails, no token can be chosen either
            seq, first = live[int(rows.slots[i])], int(rows.firsts[i])
            draft = rows.drafted[first : first + int(rows.counts[i]) - 1].tolist()
            finite[first : first + len(draft) + 1] &= [not seq.fails(draft[:n]) for n in range(len(draft) + 1)]
        chosen = np.where(finite, tokens, _BROKEN)
        self._cost.choose(len(chosen), time.perf_counter() - started)

        produced = live.length[slots] - live.prompt[slots] + rows.depth + 1
        stopped = (chosen == live.eos_ids).any(0) & live.eos[slots] & (produced > live.least[slots])
        stopped &= ~live.watched[slots]
        ends = stopped | (produced >= live.limit[slots] - live.prompt[slots])
        accepted, committed = judge(rows.firsts, rows.drafted, chosen, ends)
        there = live.busy[rows.slots]  # the others have broken off
        committed = self._sound(rows, chosen, np.where(there, committed, 0))
        if ran.chained:  # these tokens were not drafted
            rows = replace(rows, drafted=np.full_like(rows.drafted, NONE))
        if not committed.any():
            return None
        drafters = np.zeros(len(rows.slots), np.int64) if ran.drafters is None else ran.drafters[rows.slots]
        return Verified(
            rows=rows,
            results=results,
            picked=picked,
            chosen=chosen,
            produced=produced,
            stopped=stopped,
            ends=ends,
            accepted=np.minimum(accepted, committed),
            committed=committed,
            read=rows.slots[live.reading[rows.slots] & (committed > 0)],
            drafters=drafters,
            chained=ran.chained,
            goes_on=ran.goes_on,
        )

    def commit(self, verified: Verified) -> None:
        """Append the committed tokens to their sequences and to the acceptance log."""
        rows, results, picked, committed = verified.rows, verified.results, verified.picked, verified.committed
        live, chained = self._scheduler.live, verified.chained
        if self.trace is not None and self.seen:
            assert not isinstance(results, Scores)
            for slot, first, count in zip(rows.slots.tolist(), rows.firsts.tolist(), committed.tolist(), strict=True):
                if count:
                    self.trace.committed(live[slot], live[slot].generated, results[first : first + count])
        taken = rows.depth < committed[rows.owner]
        at = taken.nonzero()[0]
        whole = live.wordy[rows.slots][rows.owner[at]].nonzero()[0]
        if isinstance(results, Scores):
            judged, likely = Judged(None, results.logprobs[at], results.leads[at]), results.likely
            likely = None if likely is None else likely[at[whole]]
        else:
            assert picked is not None
            every = None if len(at) == len(taken) else at
            judged, likely = judge_rows(results, picked, every, whole if len(whole) else None), None
            if judged.logprobs is not None:
                likely = most_likely(judged.logprobs, int(live.likely[rows.slots].max()))
        if likely is not None and len(whole):
            self._note_logprobs(rows, committed, judged.chosen[whole], likely)
        self._record(verified, judged)
        if not chained:
            self._learn_from(verified)
        kept = committed > 0
        done, counts = rows.slots[kept], committed[kept]
        live.commit(done, counts, verified.chosen[at], rounds=counts if chained else 1)
        self._stats.tokens += len(at)

    def roll_back(self, verified: Verified) -> None:
        """Roll the sequences back to their committed tokens, and end those that are finished."""
        live, rows, committed = self._scheduler.live, verified.rows, verified.committed
        kept = committed > 0
        done = rows.slots[kept]
        if self._thinking is not None:
            self._thinking.keep(done, live.length[done] - 1)
        if verified.goes_on:
            live.cached[done] = live.length[done] - 1
        else:
            self._scheduler.advance(done, live.length[done] - 1)
        for slot in verified.read.tolist():
            self._scheduler.share(slot)
        last = (rows.firsts + committed - 1)[kept]
        over, stopped = verified.ends[last], verified.stopped[last]
        for slot, stop in zip(done[over].tolist(), stopped[over].tolist(), strict=True):
            live[slot].finish_reason = live[slot].finish_reason or ("stop" if stop else "length")
        for slot in done[over | live.watched[done]].tolist():
            if live[slot].finish_reason is not None:
                self._end(live[slot])

    def _read(self, windows: Windows, broken: list[int]) -> None:
        """Note which chunks were read; break off sequences with a broken row whose logits are not needed."""
        live = self._scheduler.live
        reading = live.reading[windows.slots].nonzero()[0]
        if not len(reading):
            return
        firsts = windows.lengths.cumsum() - windows.lengths
        for i in reading.tolist():
            slot, start, count, logits = (
                int(x[i]) for x in (windows.slots, windows.starts, windows.lengths, windows.logits)
            )
            if slot not in live:
                continue  # it broke off in an earlier pass of the same call
            self._stats.prompt_tokens += count - max(logits - 1, 0)
            row = int(firsts[i])
            at = next((b for b in broken if row <= b < row + count - logits), None)
            if at is None and logits:
                continue  # the last row is cached once a token is committed after it: its logits may be broken
            cached = start + count if at is None else start + at - row
            self._scheduler.advance(np.array([slot]), np.array([cached]))
            if at is not None:
                live[slot].break_off(cached)
                self._end(live[slot])
            else:
                self._scheduler.share(slot)

    def choices(self, rows: WantedRows, *, goes_on: bool = False) -> Choices:
        """Return how the token after each row is chosen, with `goes_on` also in the later passes of the call."""
        live, slots = self._scheduler.live, rows.slots[rows.owner]
        adjustments: list[Adjustment | None] | None = None
        growing: list[Growing | None] | None = None
        adjusted = (live.adjusted & live.busy)[rows.slots].any()
        if adjusted and goes_on:
            growing = [live[slot].growing() for slot in slots.tolist()]
        elif adjusted:
            adjustments = []
            for slot, first, count in zip(rows.slots.tolist(), rows.firsts.tolist(), rows.counts.tolist(), strict=True):
                draft = rows.drafted[first : first + count - 1].tolist()
                adjustments += [live[slot].adjustment(i, draft) if slot in live else None for i in range(count)]
        position = (live.length[slots] - live.prompt[slots] + rows.depth).astype(np.uint64)
        how = {name: values[slots] for name, values in live.how.items()}
        likely = live.likely[slots] if live.likely[slots].any() else None
        return Choices(**how, position=position, adjustments=adjustments, growing=growing, likely=likely)

    def _sound(self, rows: WantedRows, chosen: np.ndarray, committed: np.ndarray) -> np.ndarray:
        """Return the tokens of each window that are committed, int64 [windows], given stop strings and broken rows.

        If a broken row comes before the end, the sequence ends with an error and nothing is committed.
        """
        live = self._scheduler.live
        committed = committed.copy()
        asked = live.watched[rows.slots] & (committed > 0)
        if (chosen < 0).any():
            asked |= (np.minimum.reduceat(chosen, rows.firsts) < 0) & (committed > 0)
        for i in asked.nonzero()[0].tolist():
            seq, first, count = live[int(rows.slots[i])], int(rows.firsts[i]), int(committed[i])
            tokens: list[int] = chosen[first : first + count].tolist()
            for n, token in enumerate(tokens, 1):
                if token < 0:
                    position = int(rows.positions[i]) + n - 1
                    self._scheduler.advance(rows.slots[i : i + 1], np.array([min(position, len(seq.tokens))]))
                    seq.break_off(position, seq.fault(tokens[: n - 1]))
                    self._end(seq)
                    committed[i] = 0
                    break
                if live.watched[seq.slot] and self._stopping.ends(seq, tokens[:n]):
                    committed[i] = n
                    break
        return committed

    def _note_logprobs(self, rows: WantedRows, committed: np.ndarray, chosen: np.ndarray, likely: np.ndarray) -> None:
        """Keep the log-probabilities of the samples that ask for them."""
        live, first = self._scheduler.live, 0
        for i in np.flatnonzero(live.wordy[rows.slots] & (committed > 0)).tolist():
            slot, end = int(rows.slots[i]), first + int(committed[i])
            live[slot].logprobs += token_logprobs(likely[first:end, : live.likely[slot]], chosen[first:end])
            first = end

    def _record(self, verified: Verified, judged: Judged) -> None:
        """Write the acceptance log and update the counters; `judged` are the committed rows."""
        rows, chosen, committed = verified.rows, verified.chosen, verified.committed
        codes, chained, live = verified.drafters, verified.chained, self._scheduler.live
        kept, verifies = committed > 0, live.verified[rows.slots]
        entries, columns = log_columns(rows, chosen, committed, judged, verifies, chained=chained)
        owner = rows.owner[entries]
        self.log.write(
            owner=live.order[rows.slots][owner],
            position=verified.produced[entries] - 1,
            round=live.rounds[rows.slots][owner] + (rows.depth[entries] if chained else 0),
            drafter=codes[owner],
            **columns,
        )
        rounds = np.bincount(codes[kept], committed[kept] if chained else None)
        for code in rounds.nonzero()[0].tolist():
            counts = count_statuses(columns["status"][codes[owner] == code], int(rounds[code]))
            self._stats.drafters[self.log.drafters[code]].add(counts)

    def _learn_from(self, verified: Verified) -> None:
        """Tell the sequences and the drafter how the drafts fared."""
        rows, committed, accepted = verified.rows, verified.committed, verified.accepted
        if rows.single:
            return
        judged = np.flatnonzero((rows.counts > 1) & (committed > 0))
        tried = accepted + ((committed > accepted) & (accepted < rows.counts - 1))
        for i in judged.tolist():
            seq, name = self._scheduler.live[int(rows.slots[i])], self.log.drafters[int(verified.drafters[i])]
            seq.learn(name, int(accepted[i]), int(tried[i]))
            self._drafter.learn(seq, name, int(accepted[i]), int(tried[i]))

    def _end(self, seq: Sequence) -> None:
        seq.text, seq.stop_reason = self._stopping.text(seq), self._stopping.reason(seq)
        if self._thinking is not None:
            seq.thoughts = self._thinking.thoughts[seq.slot]
            self._stats.chunks += len(seq.thoughts)
            self._stats.thoughts += sum(map(bool, seq.thoughts))
            if self.trace is not None:
                seq.states = self._thinking.states(seq.slot)
        if seq.error is None and self.trace is not None and seq.deterministic:
            cached = int(self._scheduler.live.cached[seq.slot])
            self.trace.finished(seq, *self._cache.entries(seq.slot, 0, cached))
        self._scheduler.release(seq)
        self._done.append(seq)

    def finish(self) -> list[Sequence]:
        """Return the sequences that ended since the last call, with their records."""
        done, self._done = self._done, []
        for seq, (records, drafts) in zip(done, self.log.take([s.order for s in done]), strict=True):
            seq.records, seq.drafts = records, drafts
        return done

    def clear(self) -> None:
        """Forget all sequences."""
        self._scheduler.clear()
        self.log.clear()
        self._done.clear()
