"""Decides which sequences get pages, and which rows go into the next passes.

Results are row-invariant, so every decision here affects only speed. Knows no tensors and no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from detgen.engine.block_ends import BlockEnds
from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.running_batch import RunningBatch
from detgen.engine.sequence import Sequence
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import MOST_ROWS, Window, Windows, fill_passes
from detgen.runner.block_manager import Prefix
from detgen.runner.kv_cache import KVCache
from detgen.runner.snapshots import Snapshots

# Live sequences per page that is kept free when others are admitted. With fewer, pages stay unused where they are
# scarce; with more, sequences are preempted again and again.
_GROWING = 4
_TIGHT = 16  # a round looks at no more waiting sequences after so many that do not fit
_Number = TypeVar("_Number", int, np.ndarray)
_NOTHING = Prefix([], -1, 0, False)


class Scheduler:
    """Assigns slots and pages to waiting sequences, and rows to passes.

    Sequences are admitted in order as pages become free. One that does not fit lets others overtake it, but no more
    than `batch_size`; then all wait until it fits. If there is no page for a live sequence's next token, the youngest
    sequence gives its pages back and waits. When it is admitted again, its tokens are read again, and its output is the
    same.

    Args:
        caches: the target's KV cache first, then the draft model's; they share their pages.
        batch_size: maximum number of slots.
        started: called when a sequence takes a slot, with the slot, the tokens and how many of them are cached.
        prefill_chunk: maximum number of prompt tokens per request and round; None fills the pass.
        prefix_cache: share pages among sequences with a common prefix.
        positions: maximum number of positions in use; None for all that the caches have.
        ahead: reads the prompts of a thinking model; None if the target does not think.
        snapshots: snapshots of the states that layers of the target keep; None if there are none.

    Attributes:
        waiting: sequences without a slot, in order.
        live: sequences with a slot.
        reused: tokens whose KV entries were found.
        preemptions: how often a sequence gave its pages back.
        expected: whether a sequence waits for another to read their common prefix.
    """

    def __init__(
        self,
        caches: list[KVCache],
        batch_size: int,
        started: Callable[[int, list[int], int], None],
        prefill_chunk: int | None = None,
        prefix_cache: bool = True,
        positions: int | None = None,
        ahead: ReadingAhead | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._caches = caches
        self._pages = caches[0].pages
        self._batch_size = batch_size
        self._started = started
        self._prefill_chunk = prefill_chunk
        self._prefix_cache = prefix_cache
        self._most = self._pages.count if positions is None else min(positions // BLOCK, self._pages.count)
        self._thinking = None if ahead is None else ahead.thinking
        self._ahead = ahead
        self.waiting: deque[Sequence] = deque()
        self.live = RunningBatch()
        self._block_ends: BlockEnds | None = None
        if snapshots is not None and prefix_cache:
            self._block_ends = BlockEnds(snapshots, self._pages, self.live)
        self._added = 0
        self.reused = 0
        self.preemptions = 0
        self.expected = False

    @property
    def capacity(self) -> int:
        """The maximum number of positions of a sequence."""
        return self._most * BLOCK

    def wants(self) -> int:
        """Return the number of sequences to add: enough to look one batch ahead."""
        return max(2 * self._batch_size - len(self.waiting), 0)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences after all others."""
        for seq in sequences:
            seq.order = self._added
            self._added += 1
            self.waiting.append(seq)

    def _available(self) -> int:
        """Return the number of pages that can be taken."""
        return min(self._pages.available, self._most - self._pages.used)

    def admit(self) -> None:
        """Give pages and slots to waiting sequences, in order."""
        tight: list[Sequence] = []  # sequences that do not fit
        at = 0
        self.expected = False
        while at < len(self.waiting) and len(tight) < _TIGHT and len(self.live) < self._batch_size:
            seq = self.waiting[at]
            need, prefix = self._need(seq)
            if need is None:
                self.expected = True
                at += 1
            elif self.live and need > self._room():
                tight.append(seq)
                at += 1
                if seq.passed >= self._batch_size:
                    break
            else:
                del self.waiting[at]
                for other in tight:
                    other.passed += 1
                self._place(seq, prefix)

    def _room(self) -> int:
        """Return the number of pages for new sequences; some are reserved, since the live ones grow."""
        return self._available() - len(self.live) // _GROWING

    def _need(self, seq: Sequence) -> tuple[int | None, Prefix]:
        """Return the pages that a sequence needs and the prefix that it shares; None for pages if it has to wait."""
        blocks = _blocks(len(seq.tokens))
        if not self._prefix_cache:
            return blocks, _NOTHING
        seq.keys = self._pages.keys(seq.tokens, seq.keys)
        end = seq.asked_from + 1  # the rest needs a pass for its logits, whatever is cached
        prefix = self._pages.find(seq.tokens[:end], seq.keys[: end // BLOCK])
        if self._thinking is not None:
            prefix = prefix.cut(self._thinking.chunk)
        if prefix.pending if self._block_ends is None else self._block_ends.waits(seq, prefix):
            return None, prefix
        return self._pages.need(blocks, self._shared(prefix)), prefix

    def _shared(self, prefix: Prefix) -> Prefix:
        """Return the part of a prefix from which a sequence can continue."""
        return prefix if self._block_ends is None else self._block_ends.snapshots.shared(prefix)

    def _place(self, seq: Sequence, known: Prefix) -> None:
        slot, prefix = self.live.add(seq), self._shared(known)
        end = seq.asked_from + 1
        coming = (seq.tokens[:end], seq.keys[: end // BLOCK]) if self._prefix_cache else ((), [])
        copied = self._pages.take(slot, _blocks(len(seq.tokens)), prefix, *coming)
        if copied is not None:
            for cache in self._caches:
                cache.copy(*copied)
            if self._thinking is not None:
                self._thinking.copy(*copied[:2])
        if self._thinking is not None:
            self._thinking.start(slot, prefix.shared)
        if self._block_ends is not None:
            self._block_ends.begin(seq, known, prefix)
        self.live.cached[slot] = prefix.shared  # only now, so that no incomplete page is shared if the run ends earlier
        self._started(slot, seq.tokens, prefix.shared)
        self.reused += prefix.shared

    def reserve(self, drafts: int) -> None:
        """Give every decoding sequence a page for its next token, and pages for `drafts` more if there are some.

        If there is no page for a next token, the youngest sequences are preempted.
        """
        live = self.live
        slots = (live.busy & ~live.reading).nonzero()[0]
        lacking = slots[self.room(slots) < 0]
        for slot in lacking[live.order[lacking].argsort()].tolist():
            while slot in live and not self._grow(slot, _blocks(int(live.length[slot]))):
                self._preempt()
        if drafts:
            ends = np.minimum(live.length[slots] + drafts, live.limit[slots] - 1)
            more = live.busy[slots] & (self._pages.held[slots] * BLOCK < ends)
            for slot, end in zip(slots[more].tolist(), ends[more].tolist(), strict=True):
                self._grow(slot, _blocks(end))

    def _grow(self, slot: int, blocks: int) -> bool:
        """Give a sequence pages up to `blocks`, or none; return whether it has them."""
        more = blocks - int(self._pages.held[slot])
        return more <= 0 or (more <= self._available() and self._pages.grow(slot, blocks))

    def room(self, slots: np.ndarray) -> np.ndarray:
        """Return the positions after the last token for which slots have pages, int64 [n]."""
        room: np.ndarray = self._pages.held[slots] * BLOCK - self.live.length[slots]
        return room

    def _preempt(self) -> None:
        """Take the youngest sequence's pages; it goes back to its place in the queue."""
        seq = self.live[self.live.youngest()]
        self.release(seq)
        seq.passed = self._batch_size  # no other may overtake it and take its pages
        self.preemptions += 1
        at = next((i for i, other in enumerate(self.waiting) if other.order > seq.order), len(self.waiting))
        self.waiting.insert(at, seq)

    def advance(self, slots: np.ndarray, cached: np.ndarray) -> None:
        """Note that the first `cached` positions of slots hold canonical entries; roll back the rest.

        Args:
            slots: int64 [n].
            cached: int64 [n].
        """
        self.live.cached[slots] = cached
        self.trim(slots)

    def trim(self, slots: np.ndarray) -> None:
        """Give back the pages behind the tokens of slots, int64 [n]."""
        blocks = _blocks(self.live.length[slots])
        behind = self._pages.held[slots] > blocks
        for slot, kept in zip(slots[behind].tolist(), blocks[behind].tolist(), strict=True):
            self._pages.truncate(slot, kept)

    def share(self, slot: int) -> None:
        """Let others find a slot's canonical entries; called while tokens are read, and before pages are given back."""
        if not self._prefix_cache:
            return
        live, seq = self.live, self.live[slot]
        seq.keys = self._pages.keys(seq.tokens, seq.keys)
        self._pages.fill(slot, seq.tokens, int(live.cached[slot]), seq.keys)
        if self._block_ends is not None:
            self._block_ends.leave(slot)

    def release(self, seq: Sequence) -> None:
        """Free the slot; its canonical KV entries stay for sequences with the same prefix until pages are needed."""
        self.share(seq.slot)
        if self._block_ends is not None:
            self._block_ends.forget(seq.slot)
        self._pages.release(seq.slot)
        self.live.remove(seq.slot)

    def clear(self) -> None:
        """Release everything; nothing waits and nothing is live."""
        self.waiting.clear()
        for seq in list(self.live):
            self.release(seq)

    def passes(self, windows: Windows) -> Iterator[Windows]:
        """Divide the round's windows, and chunks of prompts that are still to be read, among passes.

        Chunks fill the passes that the windows need. If these leave rows for less than half as many tokens as the
        windows have, passes are added.

        Args:
            windows: last committed tokens and drafts of the round.

        Yields:
            The windows of each pass, together at most `MOST_ROWS` tokens.
        """
        decoding = len(windows.tokens)
        return fill_passes(windows, self.chunks(self.free(decoding), decoding, self.live.cached), MOST_ROWS)

    def free(self, decoding: int) -> int:
        """Return how many rows there are for chunks in the passes of a round, beside `decoding` others."""
        free = -decoding % MOST_ROWS if decoding else MOST_ROWS
        while free < decoding / 2:
            free += MOST_ROWS
        return free

    def chunks(self, free: int, decoding: int, cached: np.ndarray) -> list[Window]:
        """Return the chunks to read next: half of the tokens for the oldest prompt, the others for the shortest.

        Args:
            free: maximum number of tokens.
            decoding: tokens of the other windows.
            cached: int64 [slots], how many tokens of each have been read.
        """
        live = self.live
        slots = live.still_reading()
        slots = slots[cached[slots] < live.length[slots]]
        if not len(slots):
            return []
        left = live.length[slots] - cached[slots]
        if self._prefill_chunk is not None:
            left = np.minimum(left, self._prefill_chunk)  # the next chunk belongs to the next round
        if self._ahead is not None:
            ends = self._ahead.ends(cached[slots], live.thinks[slots], decoding)
            left = np.minimum(left, ends - cached[slots])
        if self._block_ends is not None:
            left = np.minimum(left, self._block_ends.ends(slots) - cached[slots])
        takes = dict(zip(slots.tolist(), left.tolist(), strict=True))
        oldest = int(slots[live.order[slots].argmin()])
        share = min(takes[oldest], -(-free // 2))
        free -= share
        for slot in sorted(takes, key=lambda slot: (takes[slot], live.order[slot])):
            if slot != oldest:
                takes[slot] = min(takes[slot], free)
                free -= takes[slot]
        takes[oldest] = min(takes[oldest], share + free)
        return [self._chunk(slot, int(cached[slot]), count) for slot, count in takes.items() if count]

    def _chunk(self, slot: int, at: int, count: int) -> Window:
        """Return a window of the next `count` tokens of a sequence, with the number of wanted logits."""
        seq = self.live[slot]
        asked = min(max(at + count - seq.asked_from, 0), count)
        return Window(slot, at, seq.tokens[at : at + count], asked)


def _blocks(positions: _Number) -> _Number:
    """Return the number of pages for that many positions."""
    return -(-positions // BLOCK)
