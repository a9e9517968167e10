"""Pages of a KV cache: which sequence has which, and which of them hold the beginning of a prompt.

A page is one key block, 64 positions. A slot has a table of pages; truncation gives whole pages back, and nothing is
moved. Prefixes are shared: whole blocks by reference, found by a chained hash of their tokens (as in vLLM's automatic
prefix caching); the first positions of a block as a copy, found by comparing tokens. Pages that are no longer in use
can be found until they are reused, the least recently used first.

Every operation takes time proportional to the number of pages that it handles. Knows no tensors and no requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from detgen.kernels.attention import BLOCK
from detgen.runner.prefix_index import WORTH_COPYING, PrefixIndex

PAGE = BLOCK  # positions of a page

_ROOT = b""  # key before the first block

Tokens = Sequence[int] | np.ndarray


class Prefix(NamedTuple):
    """The part of a prompt that the cache holds.

    Attributes:
        pages: whole pages, shared by reference.
        partial: page whose first positions are shared, too, by copying; -1 for none.
        shared: number of shared positions.
        pending: whether a slot is still reading the next block, or the whole rest, of this prompt, so that waiting for
            it pays.
    """

    pages: list[int]
    partial: int
    shared: int
    pending: bool

    def cut(self, multiple: int) -> Prefix:
        """Cut the prefix to a multiple of some number of positions; a whole page that is cut becomes a partial one."""
        shared = self.shared - self.shared % multiple
        whole, rest = divmod(shared, PAGE)
        source = self.pages[whole] if whole < len(self.pages) else self.partial
        return Prefix(self.pages[:whole], source if rest else -1, shared, self.pending)


class BlockManager:
    """The pages of one or more KV caches that hold the same positions of the same sequences.

    A page that several slots refer to, or that can be found as a whole block, must not be written: its positions are
    below the cached length of every slot that has it.

    Args:
        count: number of pages. They take no memory until they are used.
        kept: number of unused pages with content, at least 1, from which on these are reused before fresh pages, so
            that no more pages are ever touched than the most in use at a time plus `kept`; None for no limit.

    Attributes:
        count: number of pages; also the number of the scratch page, which is not one of them.
        kept: as above.
        tables: int64 [slots, blocks], C-contiguous: page of each block of a slot, the scratch page if there is none.
            Reallocated as more slots or blocks come into use.
        held: int64 [slots], number of pages of each slot.
        drafted: int64 [count + 1], number of leading positions of a page that the draft model's cache holds, too. Set
            to 0 when a page is taken for new content; otherwise the draft model's drafter writes it.
        snapshots: int64 [count + 1], place of a snapshot of the states after a page's last position; 0 for none. Set to
            0 when a page is taken for new content; otherwise `Snapshots` writes it.
        references: int64 [count], number of slots that refer to each page.
    """

    def __init__(self, count: int, kept: int | None = None) -> None:
        self.count = count
        self.kept = kept
        self.tables = np.full((1, 1), count, dtype=np.int64)
        self.held = np.zeros(1, dtype=np.int64)
        self.drafted = np.zeros(count + 1, dtype=np.int64)
        self.snapshots = np.zeros(count + 1, dtype=np.int64)
        self.references = np.zeros(count, dtype=np.int64)
        self._clear()

    def _clear(self) -> None:
        """Forget everything; all pages become fresh."""
        self._laid_out = False
        self._fresh = 0  # pages from here on have never been used
        self._empty: list[int] = []  # used before, without content
        self._retained: OrderedDict[int, None] = OrderedDict()  # with content but unused, least recently used first
        self._contents = PrefixIndex()
        self._filled: dict[int, int] = {}  # number of leading blocks of a slot that can be found or are shared
        self._promised: dict[bytes, int] = {}  # by key of a block that is being read: the slot
        self._promises: dict[int, deque[tuple[int, bytes]]] = {}  # by slot: end position and key, last one first

    @property
    def available(self) -> int:
        """Number of pages that can be taken: fresh, empty, or with content that is not in use."""
        if self._laid_out:
            return self.count
        return self.count - self._fresh + len(self._empty) + len(self._retained)

    @property
    def used(self) -> int:
        """Number of pages that slots refer to; a shared one counts once."""
        return self.count - self.available

    def keys(self, tokens: Tokens, known: Sequence[bytes] = ()) -> list[bytes]:
        """Return the keys of the whole blocks of `tokens`: each a hash of the key before and the block's tokens.

        Args:
            tokens: tokens of a sequence.
            known: keys of its first blocks.
        """
        blocks = len(tokens) // PAGE
        found = list(known[:blocks])
        data = _bytes(tokens[len(found) * PAGE : blocks * PAGE])
        key = found[-1] if found else _ROOT
        for at in range(0, len(data), 8 * PAGE):
            key = _key(key, data[at : at + 8 * PAGE])
            found.append(key)
        return found

    def find(self, tokens: Tokens, keys: Sequence[bytes]) -> Prefix:
        """Find what the cache holds of a prompt, without its last token, which always needs a pass for its logits.

        Args:
            tokens: tokens of the sequence.
            keys: keys of all its whole blocks.

        Returns:
            The prefix for `take`, valid until another method is called.
        """
        limit = len(tokens) - 1
        pages: list[int] = []
        for key in keys[: max(limit, 0) // PAGE]:
            page = self._contents.get(key)
            if page is None:
                break
            pages.append(page)
        block = len(pages)
        room = min(limit - block * PAGE, PAGE)
        if room < WORTH_COPYING:
            return Prefix(pages, -1, block * PAGE, False)
        before = keys[block - 1] if block else _ROOT
        data = _bytes(tokens[block * PAGE : (block + 1) * PAGE])
        key = keys[block] if block < len(keys) else _key(before, data)
        page = self._contents.get(key)
        if page is not None:
            return Prefix(pages, page, block * PAGE + room, False)
        page, shared = self._contents.most_alike(before, data[: 8 * room])
        return Prefix(pages, page, block * PAGE + shared, key in self._promised)

    def page(self, key: bytes) -> int | None:
        """Return the page that is found by the key of a block; None if there is none."""
        return self._contents.get(key)

    def reader(self, key: bytes) -> int | None:
        """Return the slot that is still reading the block with this key; None if there is none."""
        return self._promised.get(key)

    def need(self, blocks: int, prefix: Prefix | None = None) -> int:
        """Return how many available pages `take` would use up, including shared pages that are not in use now."""
        if prefix is None:
            return blocks
        return blocks - sum(1 for page in prefix.pages if self.references[page])

    def take(
        self,
        slot: int,
        blocks: int,
        prefix: Prefix | None = None,
        tokens: Tokens = (),
        keys: Sequence[bytes] = (),
    ) -> tuple[int, int, int] | None:
        """Give an empty slot its first pages: those of a prefix by reference, the others its own.

        Args:
            slot: the slot.
            blocks: number of pages, at least those that the prefix shares.
            prefix: the prefix that was just found.
            tokens: tokens that the slot will read, for which `find` reports `pending` until `fill` or `release`.
            keys: keys of all their whole blocks.

        Returns:
            (source page, target page, positions) for the caller to copy in the caches at once; or None.

        Raises:
            ValueError: if there are not enough pages, or the slot already has some.
        """
        if self._laid_out:
            self._reset()
        prefix = prefix or Prefix([], -1, 0, False)
        whole, copied = len(prefix.pages), prefix.shared - PAGE * len(prefix.pages)
        self._reach(slot, blocks)
        if self.held[slot] or blocks < whole + (prefix.partial >= 0) or self.need(blocks, prefix) > self.available:
            raise ValueError(f"slot {slot}, which has {self.held[slot]} pages, cannot take {blocks} more")
        for page in prefix.pages:
            self._retained.pop(page, None)
        source = prefix.partial
        unused = source in self._retained
        if unused:
            del self._retained[source]  # so that it is not evicted below
        own = [self._next() for _ in range(blocks - whole - unused)]
        copy = None
        if unused and not len(self._empty) + len(self._retained) + self.count - self._fresh:
            # The source is the last page available, so it becomes the slot's own.
            self._contents.drop(source)
            own.insert(0, source)
            self.drafted[source] = min(copied, self.drafted[source])
        elif source >= 0:
            if unused:
                own.append(self._next())
                self._retained[source] = None
            self._contents.use(source)
            copy = source, own[0], copied
            self.drafted[own[0]] = min(copied, self.drafted[source])
        pages = prefix.pages + own
        self.tables[slot, :blocks] = pages
        self.held[slot] = blocks
        self.references[pages] += 1
        self._filled[slot] = whole
        self._promise(slot, whole, tokens, keys)
        return copy

    def _promise(self, slot: int, first: int, tokens: Tokens, keys: Sequence[bytes]) -> None:
        """Record that a slot will read the blocks of `tokens` from block `first` on, unless others do already."""
        ends = [((i + 1) * PAGE, keys[i]) for i in range(first, len(keys))]
        if len(tokens) > len(keys) * PAGE:
            before = keys[-1] if keys else _ROOT
            ends.append((len(tokens), _key(before, _bytes(tokens[len(keys) * PAGE :]))))
        mine = [(end, key) for end, key in ends if self._contents.get(key) is None and key not in self._promised]
        self._promised.update((key, slot) for _, key in mine)
        self._promises[slot] = deque(reversed(mine))

    def grow(self, slot: int, blocks: int) -> bool:
        """Extend a slot to `blocks` pages; False, without any change, if there are not enough."""
        first = int(self.held[slot])
        missing = blocks - first
        if missing > self.available:
            return False
        if missing > 0:
            self._reach(slot, blocks)
            pages = [self._next() for _ in range(missing)]
            self.tables[slot, first:blocks] = pages
            self.held[slot] = blocks
            self.references[pages] = 1
        return True

    def truncate(self, slot: int, blocks: int) -> None:
        """Give back a slot's pages after its first `blocks`."""
        promises = self._promises.get(slot)
        while promises and promises[0][0] > blocks * PAGE:
            del self._promised[promises.popleft()[1]]
        last = int(self.held[slot])
        if blocks >= last:
            return
        pages = self.tables[slot, blocks:last].tolist()
        self.tables[slot, blocks:last] = self.count
        self.held[slot] = blocks
        self._filled[slot] = min(self._filled.get(slot, 0), blocks)
        self.references[pages] -= 1
        for page in reversed(pages):  # so that the roots of prefixes live longest
            if not self.references[page]:
                if page in self._contents:
                    self._retained[page] = None
                else:
                    self._empty.append(page)

    def fill(self, slot: int, tokens: Tokens, cached: int, keys: Sequence[bytes]) -> None:
        """Make a slot's content findable; call it when a block fills, a prompt has been read, and before `release`.

        Args:
            slot: the slot.
            tokens: tokens of its sequence, at least the first `cached`.
            cached: number of positions with canonical entries of these tokens that will not be written again.
            keys: keys of the whole blocks among them, or more.

        Raises:
            ValueError: if the slot does not have as many pages.
        """
        if cached > self.held[slot] * PAGE:
            raise ValueError(f"slot {slot} has {self.held[slot]} pages, fewer than {cached} positions take")
        table = self.tables[slot]
        whole = cached // PAGE
        first = self._filled.get(slot, 0)
        if whole > first:
            data = _bytes(tokens[first * PAGE : whole * PAGE])
            for block in range(first, whole):
                at = 8 * PAGE * (block - first)
                before = keys[block - 1] if block else _ROOT
                self._contents.add(int(table[block]), keys[block], before, data[at : at + 8 * PAGE])
            self._filled[slot] = whole
        if cached > whole * PAGE:
            before = keys[whole - 1] if whole else _ROOT
            data = _bytes(tokens[whole * PAGE : cached])
            self._contents.add(int(table[whole]), _key(before, data), before, data)
        promises = self._promises.get(slot)
        while promises and promises[-1][0] <= cached:
            end, key = promises.pop()
            del self._promised[key]
            self._contents.add_key(int(table[(end - 1) // PAGE]), key)  # the rest of a prompt, read with more after it

    def release(self, slot: int) -> None:
        """Give all pages of a slot back; pages with content can be found until they are reused."""
        if slot < len(self.held):
            self.truncate(slot, 0)

    def forget(self) -> None:
        """Make all content unfindable; slots keep their pages. If no slot has any, all pages are fresh again."""
        if not self.held.any():
            self._reset()
            return
        self._empty += self._retained
        self._retained.clear()
        self._contents = PrefixIndex()

    def lay_out(self, slots: int, positions: int) -> None:
        """Forget everything and give slots 0 to `slots` - 1 contiguous pages for `positions` positions each.

        For comparisons, audits and benchmarks; the next `take` or `lay_out` drops this layout, so all pages count as
        available.

        Raises:
            ValueError: if they do not fit.
        """
        blocks = -(-positions // PAGE)
        pages = slots * blocks
        if pages > self.count:
            raise ValueError(f"{slots} slots of {positions} positions exceed the {self.count} pages of the KV cache")
        self._reset()
        if pages:
            self._reach(slots - 1, blocks)
            self.tables[:slots, :blocks] = np.arange(pages).reshape(slots, blocks)
            self.held[:slots] = blocks
            self.references[:pages] = 1
            self.drafted[:pages] = self.snapshots[:pages] = 0
        self._fresh = pages
        self._laid_out = True

    def lay_out_one(self, pages: Sequence[int]) -> None:
        """Like `lay_out`, but only slot 0 has pages, these ones, some of them perhaps more than once."""
        self.lay_out(1, PAGE * (max(pages) + 1))
        self._reach(0, len(pages))
        self.tables[0, : len(pages)] = pages
        self.held[0] = len(pages)

    def _reset(self) -> None:
        self.tables.fill(self.count)
        self.held.fill(0)
        self.references[: self._fresh] = 0
        self._clear()

    def _reach(self, slot: int, blocks: int) -> None:
        """Extend the tables to this slot and that many blocks."""
        slots, width = self.tables.shape
        if slot < slots and blocks <= width:
            return
        while slots <= slot:
            slots *= 2
        while width < blocks:
            width *= 2
        tables = np.full((slots, width), self.count, dtype=np.int64)
        tables[: self.tables.shape[0], : self.tables.shape[1]] = self.tables
        held = np.zeros(slots, dtype=np.int64)
        held[: len(self.held)] = self.held
        self.tables, self.held = tables, held

    def _next(self) -> int:
        """Return a page for new content: empty, fresh, or the least recently used of unused ones."""
        enough = self.kept is not None and len(self._retained) >= self.kept
        if self._empty:
            page = self._empty.pop()
        elif self._fresh < self.count and not enough:
            page = self._fresh
            self._fresh += 1
        else:
            page = self._evict()
        self.drafted[page] = self.snapshots[page] = 0
        return page

    def _evict(self) -> int:
        page, _ = self._retained.popitem(last=False)
        self._contents.drop(page)
        return page


def _bytes(tokens: Tokens) -> bytes:
    return np.array(tokens, dtype=np.int64).tobytes()


def _key(before: bytes, data: bytes) -> bytes:
    """Return the key of a block with these tokens after the block with key `before`."""
    return blake2b(before + data, digest_size=16).digest()
