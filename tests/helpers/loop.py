"""The engine's loop around a scheduler, without a model: the cache holds token ids instead of keys."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

from detgen.engine import scheduler
from detgen.engine.request import Request
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.kernels.attention import BLOCK
from detgen.kernels.decoder import StateShape
from detgen.kernels.input_batch import Window, Windows
from detgen.machine import CPU
from detgen.params import SamplingParams
from detgen.program.arrays import FLOAT32
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache
from detgen.runner.snapshots import Snapshots
from detgen.runner.state_cache import StateCache

SHAPE = StateShape(channels=1, taps=3, heads=1, key_heads=1, size=1, values=1)


def moved(state: int, token: int) -> int:
    """What a token makes of a state; float32 holds it."""
    return (31 * state + token + 1) % 65_521


class Loop:
    """The engine's loop around a scheduler; "decodes" the numbers 1000, 1001, ... after a prompt.

    Checks at every pass what must hold of any schedule. With snapshots, the slots have states, too.
    """

    def __init__(self, batch: int, pages: int = 32, seed: int = 0, snapshots: int = 0, **settings: Any) -> None:
        self.pages = BlockManager(pages)
        self.cache, self.draft_cache = (KVCache([(1, 1, 1)], self.pages, FLOAT32, CPU) for _ in range(2))
        self.states = StateCache([SHAPE], 1, CPU)
        self.snapshots = Snapshots(self.states, self.pages, snapshots, CPU) if snapshots else None
        self.started: list[tuple[int, int]] = []
        self.scheduler = Scheduler(
            [self.cache, self.draft_cache],
            batch,
            lambda slot, tokens, cached: self.started.append((slot, cached)),
            snapshots=self.snapshots,
            **settings,
        )
        self.live = self.scheduler.live
        self.rng = random.Random(seed)
        self.batch = batch
        self.read: dict[Sequence, list[int]] = {}
        self.shared: dict[Sequence, int] = {}
        self.order: list[Sequence] = []
        self.passes = self.reading = 0
        self.most_drafts = 14

    def add(self, request: Request) -> list[Sequence]:
        tokens = list(request.token_ids or ())
        limit = min(len(tokens) + request.params.max_tokens, self.scheduler.capacity)
        new = [Sequence(request, i, list(tokens), len(tokens), limit) for i in range(request.params.n)]
        self.scheduler.add(new)
        return new

    def step(self) -> list[Sequence]:
        """One round."""
        live = self.live
        before = set(live)
        self.scheduler.admit()
        for seq in [s for s in live if s not in before]:
            cached = int(live.cached[seq.slot])
            self.order.append(seq)
            self.shared[seq] = cached
            self.read[seq] = []
            assert cached < len(seq.tokens), "the last token goes through a pass"
        assert len(live) <= self.batch
        drafts = self.rng.randrange(self.most_drafts)
        self.scheduler.reserve(drafts)
        for seq in live:
            self.check(seq)
            assert self.pages.held[seq.slot] * BLOCK >= len(seq.tokens)
        windows = []
        decoding = live.decoding()
        for slot, room in zip(decoding.tolist(), self.scheduler.room(decoding).tolist(), strict=True):
            seq = live[slot]
            most = max(min(drafts, seq.remaining - 1, room), 0) if seq.deterministic else 0
            draft = [self.rng.randrange(2000, 3000) for _ in range(most)]
            for i, token in enumerate(draft[: self.rng.randrange(14)]):
                draft[i] = 1000 + seq.generated + i if self.rng.random() < 0.7 else token
            windows.append(Window(slot, len(seq.tokens) - 1, [seq.tokens[-1], *draft], len(draft) + 1, len(draft)))
        self.decode(windows)
        done = [s for s in live if s.generated and s.remaining == 0]
        for seq in done:
            self.check(seq)
            self.scheduler.release(seq)
        assert self.pages.used == len({p for s in live for p in self.table(s.slot)})
        return done

    def decode(self, windows: list[Window]) -> None:
        verified = []
        live = self.live
        self.reading = 0
        for batch in self.scheduler.passes(Windows.of(windows)):
            self.passes += 1
            assert len(set(batch.slots.tolist())) == len(batch), "at most one window a slot"
            assert 0 < len(batch.tokens) <= scheduler.MOST_ROWS
            if self.snapshots is not None:
                self.move_states(batch)
            for w in batch:
                seq = live[w.slot]
                self.write(w.slot, w.start, [float(t) for t in w.tokens])
                if not live.reading[w.slot]:
                    verified.append(w)
                    agreed = 0
                    while agreed + 1 < len(w.tokens) and w.tokens[agreed + 1] == 1000 + seq.generated + agreed:
                        agreed += 1
                    self.commit(w.slot, agreed + 1)
                    continue
                end = w.start + len(w.tokens)
                assert w.start == live.cached[w.slot]
                assert w.tokens == seq.tokens[w.start : end]
                assert w.logits == int(end == len(seq.tokens))
                self.read[seq] += range(w.start, end)
                self.reading += len(w.tokens)
                if w.logits:
                    self.commit(w.slot, 1)
                else:
                    self.scheduler.advance(np.array([w.slot]), np.array([end]))
                self.scheduler.share(w.slot)
        assert verified == windows, "each window goes through one pass"

    def commit(self, slot: int, count: int) -> None:
        seq, slots = self.live[slot], np.array([slot])
        tokens = [1000 + seq.generated + i for i in range(count)]
        self.live.commit(slots, np.array([count]), np.array(tokens))
        self.scheduler.advance(slots, self.live.length[slots] - 1)

    def table(self, slot: int) -> list[int]:
        return self.pages.tables[slot, : self.pages.held[slot]].tolist()

    def write(self, slot: int, start: int, tokens: list[float]) -> None:
        table = self.table(slot)
        at = np.array([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, start + len(tokens))])
        entries = np.array(tokens, np.float32).reshape(-1, 1, 1)
        self.cache.write(0, at, entries, entries)

    def move_states(self, windows: Windows) -> None:
        """What a pass does to states; each is that of the sequence's own tokens."""
        spans = self.states.spans(windows)
        (layer,) = self.states.layers
        assert layer is not None
        for window, (slot, _, start, count, base, certain) in zip(windows, spans.tolist(), strict=True):
            convolved, state, kept = (x[slot].reshape(-1) for x in layer)
            before = self.live[slot].tokens[:start]
            read = [int(convolved[p % len(convolved)]) for p in range(max(start - SHAPE.taps + 1, 0), start)]
            assert read == before[max(start - SHAPE.taps + 1, 0) :], "rows that are convolved again are its own"
            value = int(state[0]) if base else 0
            ring = self.states.layers[0].kept.shape[1]  # type: ignore[union-attr]
            stood = [int(kept[p % ring * len(kept) // ring]) for p in range(base, start)]
            for position, token in enumerate([*stood, *window.tokens], base):
                if position == certain:
                    break
                value = moved(value, token)
            for position, token in enumerate(window.tokens, start):
                convolved[position % len(convolved)] = token
                if position >= certain:
                    kept[position % ring * len(kept) // ring] = token
            state[0] = value
            known = [*before, *window.tokens][:certain]
            assert value == functools.reduce(moved, known, 0), "the state is that of its tokens"
            assert start + count >= certain >= base
        self.states.move(windows)

    def check(self, seq: Sequence) -> None:
        """What counts as cached is the sequence's own, in canonical entries; pages are held for what comes next."""
        slot = seq.slot
        assert seq.tokens == self.live.texts[slot]
        assert (self.live.length[slot], self.live.last[slot]) == (len(seq.tokens), seq.tokens[-1])
        if seq.deterministic:
            cached = int(self.live.cached[slot])
            keys, _ = self.cache.entries(slot, 0, cached)
            assert keys[0, :, 0].tolist() == seq.tokens[:cached]

    def progress(self, todo: list[Sequence]) -> tuple[int, ...]:
        return self.passes, len(self.order), sum(len(s.tokens) for s in todo)

    def run(self, requests: list[Request]) -> list[Sequence]:
        """All requests to their ends, read as the scheduler wants them."""
        source = list(reversed(requests))
        todo: list[Sequence] = []
        for _ in range(100_000):
            while source and self.scheduler.wants() > 0:
                todo += self.add(source.pop())
            if not (source or self.scheduler.waiting or self.live):
                break
            before = self.passes, len(self.order), sum(len(s.tokens) for s in todo)
            self.step()
            assert before != (self.passes, len(self.order), sum(len(s.tokens) for s in todo)), (
                "each round does something"
            )
        assert self.pages.used == 0
        for seq in todo:
            assert seq.tokens[seq.prompt_length :] == [1000 + i for i in range(seq.limit - seq.prompt_length)]
        return todo


def request(i: int, length: int, prefix: int = 0, **params: Any) -> Request:
    """A prompt of its own behind `prefix` tokens that all requests share."""
    tokens = (*range(prefix), *(5000 + 700 * i + j for j in range(length - prefix)))
    return Request(i, i, token_ids=tokens, params=SamplingParams(**{"max_tokens": 5, **params}))
