"""Slots, sharing and the rows of passes, without a model: the cache holds token ids instead of keys."""

from __future__ import annotations

import random
from typing import Any

import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Request, SamplingParams
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.kernels.attention import PERIOD, attend_blocks
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Shapes, Window

MOST = 32
SHAPES = Shapes(rows=(4, MOST), dense=True, tile_rows=4, key_lengths=(64, 128, PERIOD), attend=attend_blocks)


class Loop:
    """The engine's loop around a scheduler; "decodes" the numbers 1000, 1001, ... after a prompt.

    Checks at every pass what must hold of any schedule.
    """

    def __init__(self, batch: int, positions: int = 2048, seed: int = 0) -> None:
        shapes = [(1, 1, 1)]
        self.cache, self.draft_cache = (
            KVCache(shapes, positions, torch.float32, torch.device("cpu")) for _ in range(2)
        )
        self.started: list[tuple[int, int | None, int]] = []
        self.scheduler = Scheduler(
            [self.cache, self.draft_cache], SHAPES, batch, lambda *args: self.started.append(args)
        )
        self.rng = random.Random(seed)
        self.batch = batch
        self.read: dict[Sequence, list[int]] = {}
        self.shared: dict[Sequence, int] = {}
        self.order: list[Sequence] = []
        self.passes = 0

    def add(self, request: Request) -> list[Sequence]:
        tokens = list(request.token_ids or ())
        limit = min(len(tokens) + request.params.max_tokens, self.scheduler.capacity)
        new = [Sequence(request, i, list(tokens), len(tokens), limit) for i in range(request.params.n)]
        self.scheduler.waiting.extend(new)
        return new

    def step(self) -> list[Sequence]:
        """One round."""
        before = set(self.scheduler.live.values())
        waiting = list(self.scheduler.waiting)
        self.scheduler.admit()
        new = [s for s in self.scheduler.live.values() if s not in before]
        assert new == waiting[: len(new)], "first come, first served"
        assert [slot for slot, _, _ in self.started[len(self.started) - len(new) :]] == [s.slot for s in new]
        self.order += new
        for seq in new:
            self.shared[seq], self.read[seq] = seq.cached, []
            assert seq.cached < seq.prompt_length, "the last prompt token goes through a pass"
        for slot, seq in self.scheduler.live.items():
            assert seq.slot == slot < self.cache.slots <= self.batch
            assert seq.limit <= self.cache.slot_size
            assert self.draft_cache.slot_size == self.cache.slot_size
            self.check(seq)
        windows = []
        for seq in self.scheduler.live.values():
            if seq.generated and seq.deterministic:
                draft = [self.rng.randrange(2000, 3000) for _ in range(min(self.rng.randrange(14), seq.remaining - 1))]
                for i, token in enumerate(draft[: self.rng.randrange(14)]):
                    draft[i] = 1000 + seq.generated + i if self.rng.random() < 0.7 else token
                windows.append(Window(seq.slot, len(seq.tokens) - 1, [seq.tokens[-1], *draft], len(draft) + 1))
            elif seq.generated:
                self.write(seq.slot, len(seq.tokens) - 1, [-1.0])  # the fast path's entry is not canonical
                seq.tokens.append(1000 + seq.generated)
                self.scheduler.advance(seq, len(seq.tokens) - 1)
        self.decode(windows)
        done = [s for s in self.scheduler.live.values() if s.generated and s.remaining == 0]
        for seq in done:
            self.check(seq)
            self.scheduler.release(seq)
        return done

    def decode(self, windows: list[Window]) -> None:
        verified = []
        for batch in self.scheduler.passes(windows):
            self.passes += 1
            slots = [w.slot for w in batch]
            assert len(set(slots)) == len(slots), "at most one window a slot"
            assert 0 < sum(len(w.tokens) for w in batch) <= MOST
            for w in batch:
                seq = self.scheduler.live[w.slot]
                self.write(w.slot, w.start, [float(t) for t in w.tokens])
                if seq.generated:
                    verified.append(w)
                    self.accept(w, seq)
                else:
                    assert w.tokens == seq.tokens[w.start : w.start + len(w.tokens)]
                    self.read[seq] += range(w.start, w.start + len(w.tokens))
                    self.scheduler.advance(seq, w.start + len(w.tokens))
                    last = w.start + len(w.tokens) == seq.prompt_length
                    assert w.logits == int(last)
                    if last:
                        seq.tokens.append(1000)
                        self.scheduler.advance(seq, len(seq.tokens) - 1)
        assert verified == windows, "each window goes through one pass"

    def accept(self, window: Window, seq: Sequence) -> None:
        for i in range(len(window.tokens)):
            token = 1000 + seq.generated
            seq.tokens.append(token)
            if i + 1 < len(window.tokens) and window.tokens[i + 1] != token:
                break
        self.scheduler.advance(seq, len(seq.tokens) - 1)

    def write(self, slot: int, start: int, tokens: list[float]) -> None:
        assert start + len(tokens) <= self.cache.slot_size, "a window stays in its slot"
        at = torch.arange(len(tokens)) + slot * self.cache.slot_size + start
        entries = torch.tensor(tokens).view(-1, 1, 1)
        self.cache.write(0, at, entries, entries)

    def check(self, seq: Sequence) -> None:
        """What counts as cached is the sequence's own, in canonical entries."""
        if seq.deterministic:
            keys, _ = self.cache.entries(seq.slot, 0, seq.cached)
            assert keys[0, :, 0].tolist() == seq.tokens[: seq.cached]

    def run(self, requests: list[Request]) -> list[Sequence]:
        """All requests to their ends, read as the scheduler wants them."""
        source = [list(reversed(requests))]
        todo: list[Sequence] = []
        while source[0] or self.scheduler.waiting or self.scheduler.live:
            while source[0] and self.scheduler.wants() > 0:
                todo += self.add(source[0].pop())
            assert len(self.scheduler.waiting) <= 2 * self.batch + max((r.params.n for r in requests), default=0)
            before = self.passes, len(self.scheduler.live), len(self.scheduler.waiting)
            self.step()
            assert before != (self.passes, len(self.scheduler.live), len(self.scheduler.waiting)) or any(
                not s.deterministic for s in todo
            ), "every round does something"
        assert self.order == todo
        for seq in todo:
            assert self.read[seq] == list(range(self.shared[seq], seq.prompt_length)), "each prompt token once"
            assert len(seq.tokens) == seq.limit
        return todo


def request(i: int, length: int, prefix: int = 0, **params: Any) -> Request:
    """A prompt of its own behind `prefix` tokens that all requests share."""
    tokens = (*range(prefix), *(5000 + 700 * i + j for j in range(length - prefix)))
    return Request(i, i, token_ids=tokens, params=SamplingParams(**{"max_tokens": 5, **params}))


REQUESTS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 6), st.integers(20, 90), st.sampled_from([120, 128, 129, 400])),
        st.sampled_from([0, 0, 3, 4, 19, 64]),
        st.integers(1, 24),
        st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@examples(50)
@given(some=REQUESTS, batch=st.integers(1, 6), positions=st.sampled_from([512, 1024, 4096]), seed=st.integers(0, 99))
def test_any_schedule(some: list[tuple[int, int, int, int, bool]], batch: int, positions: int, seed: int) -> None:
    """Whatever the requests: the queue's order, rows within a pass, prompts read once, entries each one's own."""
    requests = [
        request(i, length, min(prefix, length), max_tokens=new, n=n, deterministic=verified)
        for i, (length, prefix, new, n, verified) in enumerate(some)
    ]
    Loop(batch, positions, seed).run(requests)


def test_a_slot_is_refilled_at_once() -> None:
    """When a request finishes, the next one takes its slot in the round after."""
    loop = Loop(2)
    loop.add(request(0, 4, max_tokens=1))
    loop.add(request(1, 4, max_tokens=50))
    loop.add(request(2, 4, max_tokens=50))
    assert [s.request.index for s in loop.step()] == [0]
    loop.step()
    assert sorted(s.request.index for s in loop.scheduler.live.values()) == [1, 2]
    assert len(loop.scheduler.live) == 2


def test_looks_one_batch_ahead() -> None:
    """It wants a batch in the slots and one behind it, not the whole file."""
    loop = Loop(3)
    asked = 0
    while loop.scheduler.wants() > 0:
        loop.add(request(asked, 4))
        asked += 1
    assert asked == 6
    loop.step()
    assert loop.scheduler.wants() == 3


def test_samples_share_the_prompt() -> None:
    """The first sample reads the prompt; the others wait and copy all of it but the last token."""
    loop = Loop(4)
    first, *others = loop.add(request(0, 100, n=3))
    loop.step()
    assert list(loop.scheduler.live.values()) == [first]
    loop.step()
    assert [loop.shared[s] for s in others] == [99, 99]
    assert loop.scheduler.reused == 198
    assert loop.started == [(0, None, 0), (1, 0, 99), (2, 0, 99)]
    assert len(loop.read[first]) == 100
    assert all(loop.read[s] == [99] for s in others)


def test_a_long_sample_waits_through_several_passes() -> None:
    """A prompt longer than a pass is read in chunks before its siblings start."""
    loop = Loop(2)
    first, second = loop.add(request(0, 5 * MOST, n=2, max_tokens=9))
    while second.slot < 0:
        assert not second.tokens[160:]
        loop.step()
        assert len(loop.started) < 2 or first.cached >= 159
    assert loop.shared[second] == 159


def test_prompts_that_share_a_beginning() -> None:
    """A slot's entries stay for the next request with the same first tokens, live or done."""
    loop = Loop(1)
    loop.run([request(0, 60), request(1, 60, prefix=0), request(0, 61), request(3, 10)])
    assert [loop.shared[s] for s in loop.order] == [0, 0, 0, 0], "the slot was taken by another prompt in between"
    loop = Loop(2)
    loop.run([request(0, 60, max_tokens=30), request(0, 75, max_tokens=3), request(0, 60, max_tokens=3)])
    assert [loop.shared[s] for s in loop.order] == [0, 0, 59]


def test_short_beginnings_are_read_anew() -> None:
    """Fewer shared tokens than copying is worth."""
    loop = Loop(1)
    loop.run([request(0, 20, prefix=3), request(1, 20, prefix=3), request(2, 20, prefix=4), request(3, 20, prefix=4)])
    assert [loop.shared[s] for s in loop.order] == [0, 0, 0, 4]


def test_entries_of_the_fast_path_are_not_shared() -> None:
    """An unverified request leaves its prompt behind for others, nothing that it decoded."""
    loop = Loop(1)
    unverified = request(0, 30, max_tokens=20, deterministic=False)
    longer = Request(
        1, 1, token_ids=(*(unverified.token_ids or ()), *range(1000, 1015)), params=SamplingParams(max_tokens=3)
    )
    loop.run([unverified, longer])
    assert 4 <= loop.shared[loop.order[1]] <= 30


def test_a_long_request_gets_its_slot() -> None:
    """One that needs the whole buffer waits for the others, runs alone, and those behind it follow."""
    loop = Loop(4, positions=512)
    loop.run([request(i, 400 if i == 2 else 10) for i in range(7)])
    assert [s.request.index for s in loop.order] == list(range(7))


def test_capacity() -> None:
    """The longest sequence that can ever run is one that the key lengths allow in the buffer."""
    for positions in (384, 511, 512, 700, 5000):
        capacity = Loop(3, positions).scheduler.capacity
        assert SHAPES.fit_keys(capacity) <= positions
        assert SHAPES.fit_keys(capacity + 64) > positions


@given(widths=st.lists(st.sampled_from([1, 2, 5, 15, 16, 17, 30, MOST - 1, MOST]), min_size=1, max_size=12))
def test_windows_fill_passes(widths: list[int]) -> None:
    """Windows of any widths go in order into passes that are full, and no fuller."""
    windows = [Window(i, 0, [1] * n, n) for i, n in enumerate(widths)]
    passes = list(Loop(12).scheduler.passes(windows))
    assert [w for batch in passes for w in batch] == windows
    totals = [sum(len(w.tokens) for w in batch) for batch in passes]
    assert max(totals) <= MOST
    for total, following in zip(totals, passes[1:], strict=False):
        assert total + len(following[0].tokens) > MOST
