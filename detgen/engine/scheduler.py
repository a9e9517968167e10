"""Which sequence gets which slot, and which rows go into the next passes.

Results are row-invariant, so every decision here affects only the speed. Knows no tensors and no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from detgen.engine.sequence import Sequence
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Shapes, Window, common_prefix, fill_passes

_WORTH_COPYING = 4  # least shared prompt tokens for which copying KV entries beats reading them again


class Scheduler:
    """Assigns slots to waiting sequences and rows to passes.

    Args:
        caches: the target's KV cache first, then the draft model's, which has the same slots.
        shapes: shapes of canonical passes.
        batch_size: most slots.
        started: called with (slot, source slot or None, shared length) when a sequence takes a slot.
        prefill_chunk: most prompt tokens of a request per round; None fills the pass.
        prefix_cache: reuse the KV entries of a prompt's beginning if a slot holds them.

    Attributes:
        waiting: sequences without a slot, in order.
        live: sequences by slot.
        reused: prompt tokens whose KV entries were reused.
    """

    def __init__(
        self,
        caches: list[KVCache],
        shapes: Shapes,
        batch_size: int,
        started: Callable[[int, int | None, int], None],
        prefill_chunk: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self._caches = caches
        self._shapes = shapes
        self._batch_size = batch_size
        self._started = started
        self._prefill_chunk = prefill_chunk
        self._prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.live: dict[int, Sequence] = {}
        self._contents: list[list[int]] = []  # tokens whose canonical KV entries each slot holds
        self._cut = 0  # which cut of the KV buffers they are in
        self.reused = 0

    @property
    def capacity(self) -> int:
        """Most positions of a sequence."""
        positions = self._caches[0].positions
        block = self._shapes.fit_keys(1)
        length = positions // block * block
        while length and self._shapes.fit_keys(length) > positions:
            length -= block
        return length

    def wants(self) -> int:
        """How many more sequences to add to `waiting`: enough to look one batch ahead."""
        return 2 * self._batch_size - len(self.waiting)

    def admit(self) -> None:
        """Give free slots to waiting sequences, in order."""
        if not self.live:
            self._repartition()
        while self.waiting and len(self.live) < len(self._contents):
            seq = self.waiting[0]
            if seq.limit > self._caches[0].slot_size or self._sibling_reading(seq):
                return  # wait until the others are done, or until the prompt's KV entries can be reused
            self.waiting.popleft()
            self._place(seq)

    def _repartition(self) -> None:
        """Cut the KV buffer for the longest of the next sequences, unless the present slots fit it."""
        if not self.waiting:
            return
        cache = self._caches[0]
        if self._cut != cache.cuts:  # another engine has used the caches since
            self._contents = []
        ahead = list(self.waiting)[: 2 * self._batch_size]
        positions = cache.positions
        slot_size = self._shapes.fit_keys(max(s.limit for s in ahead))
        if positions // slot_size < min(self._batch_size, len(ahead)):
            # Too long for a whole batch: serve the head of the queue; the long one's turn comes.
            slot_size = self._shapes.fit_keys(self.waiting[0].limit)
        slots = max(min(self._batch_size, positions // slot_size), 1)
        if cache.slot_size >= slot_size and len(self._contents) >= slots:
            return
        for each in self._caches:
            each.partition(slot_size, slots)
        self._cut = cache.cuts
        self._contents = [[] for _ in range(slots)]

    def _sibling_reading(self, seq: Sequence) -> bool:
        """Whether another sample of the request is still reading the prompt, whose KV entries this one will reuse."""
        if not self._prefix_cache or not seq.sample:
            return False
        return any(s.request is seq.request and s.cached < s.prompt_length - 1 for s in self.live.values())

    def _place(self, seq: Sequence) -> None:
        free = [i for i in range(len(self._contents)) if i not in self.live]
        prompt = seq.tokens[:-1]  # the last token always goes through a pass, for its logits
        source, shared = max(
            ((i, common_prefix(held, prompt)) for i, held in enumerate(self._contents)), key=lambda found: found[1]
        )
        slot = source if source in free else free[0]
        if shared < _WORTH_COPYING or not self._prefix_cache:
            shared = 0
        elif source != slot:
            self._caches[0].copy_prefix(source, slot, shared)
        self._started(slot, source if shared else None, shared)
        self._contents[slot] = seq.tokens[:shared]
        self.reused += shared
        seq.slot, seq.cached = slot, shared
        self.live[slot] = seq

    def advance(self, seq: Sequence, cached: int) -> None:
        """Note that the first `cached` positions hold canonical KV entries; roll back what comes after them."""
        seq.cached = cached
        held = self._contents[seq.slot]
        end = cached if seq.deterministic else min(cached, seq.prompt_length)
        held[len(held) :] = seq.tokens[len(held) : end]

    def release(self, seq: Sequence) -> None:
        """Free the slot; its KV entries stay for prompts that begin alike."""
        del self.live[seq.slot]

    def passes(self, windows: list[Window]) -> Iterator[list[Window]]:
        """Divide the round's windows, and chunks of the prompts being read, among passes.

        Args:
            windows: last committed tokens and drafts of the round.

        Returns:
            The windows of each pass, together at most `shapes.most_rows` tokens.
        """
        reads = []
        for seq in sorted(self.live.values(), key=lambda s: s.prompt_length - s.cached):
            at, end = seq.cached, seq.prompt_length
            if at >= end or seq.generated:
                continue
            if self._prefill_chunk is not None:
                end = min(end, at + self._prefill_chunk)  # the next chunk belongs to the next round
            reads.append(Window(seq.slot, at, seq.tokens[at:end], int(end == seq.prompt_length)))
        return fill_passes(windows, reads, self._shapes.most_rows)
