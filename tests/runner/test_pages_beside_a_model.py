"""Pages beside a model of the cache in plain Python: no page lost, none owned twice, every entry the right prefix's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis
import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from detgen.runner.block_manager import PAGE, BlockManager, Prefix

SLOTS = 5
WHAT = (
    "adopted",
    "admitted again",
    "broken promise",
    "copied",
    "could not grow",
    "evicted",
    "found all",
    "owned by several",
    "pending",
    "preempted",
    "refused",
    "shared by reference",
    "shared while in use",
    "truncated",
    "waiting would have paid",
    "woken",
)
seen: Counter[str] = Counter()


@dataclass
class Live:
    """A sequence in a slot.

    Attributes:
        tokens: prompt and what was committed.
        reading: length of what it reads from the start: the prompt, or after a preemption all that was committed.
        cached: leading positions with canonical entries.
        filled: those that are findable.
    """

    tokens: list[int]
    reading: int
    cached: int
    keys: list[bytes]
    filled: int = 0


def blocks_of(positions: int) -> int:
    return -(-positions // PAGE)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Few prompts, which begin alike: whole blocks of 0 or 1, then a rest that leaves one of three runs at some place.
runs = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([1, 3, 4, 5, 20, 40, 63, 64]))
prompts = st.builds(
    lambda blocks, rest: [b for b in blocks for _ in range(PAGE)] + [rest[0]] * rest[2] + [rest[1]] * (PAGE - rest[2]),
    st.lists(st.integers(0, 1), max_size=3),
    runs,
).flatmap(lambda tokens: st.sampled_from([0, 0, 1, 30]).map(lambda cut: tokens[: len(tokens) - cut]))


class Cache(RuleBasedStateMachine):
    """Sequences come, read, decode, guess wrongly, give way and end, as the engine has them do it.

    What stands for a KV entry is the whole prefix up to it: a node of the tree of all prefixes.
    """

    @initialize(count=st.integers(3, 14), kept=st.sampled_from([None, None, 1, 3]))
    def start(self, count: int, kept: int | None) -> None:
        self.pages = BlockManager(count, kept)
        self.tree: dict[tuple[int, int], int] = {}
        self.entries = np.full((count + 1, PAGE), -1)
        self.draft_entries = np.full((count + 1, PAGE), -1)
        self.live: dict[int, Live] = {}
        self.waiting: list[list[int]] = []  # preempted
        self.known: list[list[int]] = [[0] * 70]  # prompts that were asked for lately
        self.findable: list[list[int]] = []  # what was filled since everything was forgotten
        self.complete = True  # nothing that is still being written was forgotten
        self.known_nodes: dict[tuple[int, ...], list[int]] = {}
        self.touched: set[int] = set()
        self.peak = 0

    def nodes(self, tokens: list[int]) -> list[int]:
        """What entries of these tokens must hold."""
        key = tuple(tokens)
        if key in self.known_nodes:
            return self.known_nodes[key]
        found, node = [], 0
        for token in tokens:
            node = self.tree.setdefault((node, token), len(self.tree) + 1)
            found.append(node)
        self.known_nodes[key] = found
        return found

    def places(self, slot: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(first, last)
        return self.pages.tables[slot, at // PAGE], at % PAGE

    def write(self, slot: int, tokens: list[int], first: int) -> None:
        """Write the entries of tokens[first:]; nobody else may have the page."""
        pages, at = self.places(slot, first, len(tokens))
        assert (pages < self.pages.count).all(), "each position has a page"
        assert (self.pages.references[pages] == 1).all(), "a shared page is never written"
        self.entries[pages, at] = self.nodes(tokens)[first:]

    # What the engine does.

    @rule(
        slot=st.integers(0, SLOTS - 1), tokens=prompts, more=st.sampled_from([0] * 6 + [1, None]), again=st.booleans()
    )
    def admit(self, slot: int, tokens: list[int], more: int | None, again: bool) -> None:
        """A sequence with pages for its tokens and `more`, or with all that there are."""
        if slot in self.live:
            return
        if again and self.waiting:
            tokens = self.waiting.pop()
            seen["admitted again"] += 1
        elif again:
            tokens = list(self.known[slot % len(self.known)])
        self.known = [*self.known[-5:], tokens]
        keys = self.pages.keys(tokens)
        prefix = self.pages.find(tokens, keys)
        blocks = blocks_of(len(tokens))
        need = self.pages.need(blocks, prefix)
        more = max(self.pages.available - need, 0) if more is None else more
        blocks, need = blocks + more, need + more
        if need > self.pages.available:
            before = self.pages.tables.copy()
            with pytest.raises(ValueError, match=f"slot {slot}"):
                self.pages.take(slot, blocks, prefix, tokens, keys)
            assert (self.pages.tables[: len(before), : before.shape[1]] == before).all()
            seen["refused"] += 1
            if more is not None:
                self.give_way(max(self.live, default=-1))
            return
        available, lost = self.pages.available, self.everything_found()
        referred = [int(p) for p in self.pages.references]
        copy = self.pages.take(slot, blocks, prefix, tokens, keys)
        assert self.pages.available == available - need
        table = self.pages.tables[slot].tolist()
        whole = len(prefix.pages)
        assert table[:whole] == prefix.pages
        own = table[whole:blocks]
        assert not any(referred[p] for p in own), "a page for new content is nobody else's"
        if copy is not None:
            source, target, positions = copy
            assert (source, positions) == (prefix.partial, prefix.shared - PAGE * whole)
            assert target == own[0] != source not in own
            held = min(positions, self.pages.drafted[source])
            for entries in (self.entries, self.draft_entries):
                entries[target, :positions] = entries[source, :positions]
            seen["copied"] += 1
        elif prefix.partial >= 0:
            assert own[0] == prefix.partial
            held = min(prefix.shared - PAGE * whole, self.pages.drafted[own[0]])
            seen["adopted"] += 1
        else:
            held = 0
        assert self.pages.drafted[own].tolist() == ([held] + [0] * len(own))[: len(own)]
        self.live[slot] = Live(tokens, len(tokens), prefix.shared, keys, PAGE * whole)
        seen["shared by reference"] += bool(whole)
        seen["shared while in use"] += any(referred[p] for p in prefix.pages)
        seen["woken"] += not all(referred[p] for p in prefix.pages)
        seen["evicted"] += self.everything_found() < lost
        seen["waiting would have paid"] += prefix.pending

    def everything_found(self) -> int:
        return len(self.pages._contents)

    @precondition(lambda self: any(s.cached < s.reading for s in self.live.values()))
    @rule(chunk=st.sampled_from([1, 30, 64, 100, 1000, 1000]), most=st.integers(1, SLOTS))
    def read(self, chunk: int, most: int) -> None:
        """A chunk of some of the prompts."""
        for slot in [i for i, s in self.live.items() if s.cached < s.reading][:most]:
            seq = self.live[slot]
            end = min(seq.cached + chunk, seq.reading)
            self.write(slot, seq.tokens[:end], seq.cached)
            whole = end // PAGE > seq.cached // PAGE
            seq.cached = end
            if whole or end == seq.reading:
                self.fill(slot)

    def fill(self, slot: int) -> None:
        seq = self.live[slot]
        seq.keys = self.pages.keys(seq.tokens, seq.keys)
        self.pages.fill(slot, seq.tokens, seq.cached, seq.keys)
        seq.filled = seq.cached
        self.findable.append(seq.tokens[: seq.cached])

    @precondition(lambda self: any(s.cached >= s.reading for s in self.live.values()))
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 2, 5, 30, 63, 64]),
        wrong=st.sampled_from([0, 0, 1, 5, 70]),
        token=st.integers(0, 2),
    )
    def decode(self, data: st.DataObject, count: int, wrong: int, token: int) -> None:
        """Commit tokens, after a window that also held wrong ones: rolled back, their pages go back."""
        slot = data.draw(st.sampled_from([i for i, s in self.live.items() if s.cached >= s.reading]))
        seq = self.live[slot]
        new = [*seq.tokens, *[token] * count]
        blocks = blocks_of(len(new) + wrong)
        available, held = self.pages.available, int(self.pages.held[slot])
        grown = self.pages.grow(slot, blocks)
        assert grown == (blocks - held <= available)
        if not grown:
            assert (self.pages.available, int(self.pages.held[slot])) == (available, held)
            seen["could not grow"] += 1
            return
        assert self.pages.available == available - max(blocks - held, 0)
        added = self.pages.tables[slot, held:blocks]
        assert (self.pages.references[added] == 1).all()
        assert not self.pages.drafted[added].any()
        self.write(slot, new + [3] * wrong, seq.cached)
        whole = len(new) // PAGE > seq.cached // PAGE
        seq.tokens, seq.cached = new, len(new)
        if blocks_of(len(new)) < self.pages.held[slot]:
            self.pages.truncate(slot, blocks_of(len(new)))
            seen["truncated"] += 1
        if whole:
            self.fill(slot)

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        """The draft model reads a sequence into its own cache, but not what it holds already."""
        slot = data.draw(st.sampled_from(list(self.live)))
        seq = self.live[slot]
        nodes = self.nodes(seq.tokens)
        for block in range(blocks_of(len(seq.tokens))):
            page = self.pages.tables[slot, block]
            part = nodes[block * PAGE : (block + 1) * PAGE]
            held = int(self.pages.drafted[page])
            if held < len(part):
                self.draft_entries[page, held : len(part)] = part[held:]
                self.pages.drafted[page] = len(part)

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data(), preempt=st.booleans(), filled=st.booleans(), early=st.integers(0, 5))
    def release(self, data: st.DataObject, preempt: bool, filled: bool, early: int) -> None:
        """A sequence ends, or gives way to others and comes again with all that was committed."""
        slot = data.draw(st.sampled_from(list(self.live)))
        if early and self.live[slot].cached < self.live[slot].reading:
            return
        if filled:
            self.fill(slot)
        if preempt:
            self.give_way(slot)
        else:
            self.end(slot)

    def end(self, slot: int) -> None:
        seq = self.live.pop(slot)
        self.pages.release(slot)
        seen["broken promise"] += seq.filled < seq.reading

    def give_way(self, slot: int) -> None:
        if slot in self.live:
            self.waiting.append([*self.live[slot].tokens, 1])
            self.end(slot)
            seen["preempted"] += 1

    @precondition(lambda self: len(self.live) < 2)
    @rule(layout=st.booleans(), slots=st.integers(1, 3), often=st.integers(0, 5))
    def forget(self, layout: bool, slots: int, often: int) -> None:
        if often:
            return
        if layout and not self.live:
            self.pages.lay_out(slots, self.pages.count // slots * PAGE)
            blocks = self.pages.count // slots
            at = [self.pages.tables[i, :blocks].tolist() for i in range(slots)]
            assert at == [list(range(i * blocks, (i + 1) * blocks)) for i in range(slots)]
            assert self.pages.held.sum() == slots * blocks
            assert (self.pages.available, self.pages.used) == (self.pages.count, 0)
            self.entries.fill(-1)
            self.draft_entries.fill(-1)
            self.pages.take(0, 0)
            self.pages.release(0)
            self.touched = set()
            self.peak = 0
        else:
            self.pages.forget()
        self.findable = []
        self.complete = not self.live

    # What must hold at any time.

    @invariant()
    def each_page_has_its_owners(self) -> None:
        pages = self.pages
        owners: dict[int, list[tuple[int, int]]] = {}
        for slot, table in enumerate(pages.tables.tolist()):
            held = int(pages.held[slot])
            assert slot in self.live or not held
            assert (np.array(table[held:]) == pages.count).all()
            for block, page in enumerate(table[:held]):
                owners.setdefault(page, []).append((slot, block))
        assert pages.tables.flags.c_contiguous
        for those in owners.values():
            if len(those) > 1:
                seen["owned by several"] += 1
                assert len({block for _, block in those}) == 1, "shared at the same place"
                end = PAGE * (those[0][1] + 1)
                assert all(self.live[slot].cached >= end for slot, _ in those), "shared as a whole block"
        assert pages.references.tolist() == [len(owners.get(p, ())) for p in range(pages.count)]
        assert pages.used == len(owners)
        assert pages.available == pages.count - len(owners)
        self.touched |= set(owners)
        self.peak = max(self.peak, len(owners))
        assert pages.kept is None or len(self.touched) <= self.peak + pages.kept

    @invariant()
    def what_is_read_was_written_for_it(self) -> None:
        for slot, seq in self.live.items():
            nodes = self.nodes(seq.tokens)
            assert self.entries[self.places(slot, 0, seq.cached)].tolist() == nodes[: seq.cached]
            for block in range(blocks_of(len(seq.tokens))):
                page = self.pages.tables[slot, block]
                part = nodes[block * PAGE : (block + 1) * PAGE][: self.pages.drafted[page]]
                assert self.draft_entries[page, : len(part)].tolist() == part

    @invariant()
    def what_is_found_was_written_for_it(self) -> None:
        """Also what a sequence that comes next would read; and all of it is found as long as nothing was evicted."""
        for tokens in [*self.known, *[s.tokens for s in self.live.values()]]:
            prefix = self.pages.find(tokens, self.pages.keys(tokens))
            whole = len(prefix.pages)
            assert prefix.shared <= max(len(tokens) - 1, 0)
            assert prefix.partial >= 0 or prefix.shared == PAGE * whole
            held = np.concatenate(
                [self.entries[p] for p in [*prefix.pages, *[prefix.partial][: prefix.partial >= 0]]] or [[]]
            )
            assert held[: prefix.shared].tolist() == self.nodes(tokens)[: prefix.shared]
            self.check_pending(tokens, prefix)
            if len(self.touched) < self.pages.count and self.pages.kept is None and self.complete:
                best = max([common(tokens[:-1], held) for held in self.findable], default=0)
                if best % PAGE < 4:
                    best = best // PAGE * PAGE
                assert prefix.shared == best
                seen["found all"] += best > 0

    def check_pending(self, tokens: list[int], prefix: Prefix) -> None:
        if not prefix.pending:
            return
        end = min((len(prefix.pages) + 1) * PAGE, len(tokens))
        reading = [s for s in self.live.values() if s.tokens[:end] == tokens[:end] and s.filled < end <= s.reading]
        assert reading, "somebody reads what is waited for"
        seen["pending"] += 1

    def teardown(self) -> None:
        """Every page can be had again, one time each."""
        if not hasattr(self, "pages"):
            return
        pages = self.pages
        for slot in self.live:
            pages.release(slot)
        assert (pages.available, pages.used) == (pages.count, 0)
        assert not pages._promised
        pages.take(0, 1)
        assert not pages.grow(0, pages.count + 1)
        assert pages.grow(0, pages.count)
        assert sorted(pages.tables[0, : pages.count].tolist()) == list(range(pages.count))
        assert not pages._contents._pages
        assert not pages._contents._families


def test_pages_beside_a_model_of_the_cache() -> None:
    """The whole life of pages; what this is about did happen."""
    seen.clear()
    run_state_machine_as_test(Cache, settings=hypothesis.settings(examples(200), stateful_step_count=50))
    assert not [what for what in WHAT if not seen[what]]
