"""The thoughts that the slots of a KV cache have had, and the states that these leave.

A slot's state is a function of its thoughts, and these are a function of its tokens, so they are shared together with
the KV entries of a prefix. Only committed rows are kept; the rows of a chunk that T reads may come from several passes.
A window may reach over several chunks, as if only the last of them could think: `keep` tells how far that was right.
Knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Windows
from detgen.machine import Device
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.thinker import Thinker

Thought = tuple[int, ...]

_ROOM = 16  # slots to make room for at first


class Thinking:
    """Thoughts and states of the slots of a cache.

    Args:
        thinker: T and C.
        pages: pages of the cache.
        device: device of the states.

    Attributes:
        thinker: as above.
        chunk: tokens of a chunk.
        thoughts: by slot, one thought per full chunk; () for an empty one.
    """

    def __init__(self, thinker: Thinker, pages: BlockManager, device: Device) -> None:
        self.chunk = thinker.chunk
        self.thoughts: dict[int, list[Thought]] = {}
        self.thinker = thinker
        self._pages = pages
        self._device = str(device)
        self._states = self._table(_ROOM)  # for the chunk that is being read, or comes next
        self._hidden = self._table(_ROOM)  # kept rows of that chunk
        self._kept = np.zeros(_ROOM, np.int64)  # number of positions of a slot whose rows were kept
        self._ends: dict[int, list[Thought]] = {}  # by page: the thought of the chunk that ends at each position
        self._windows: dict[int, tuple[int, torch.Tensor]] = {}  # of the last pass, by slot: start, rows [n, hidden]

    def _table(self, slots: int) -> torch.Tensor:
        shape = slots, self.chunk, self.thinker.hidden
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    @torch.inference_mode()  # whatever mode the tables grew in
    def start(self, slot: int, cached: int) -> None:
        """Begin a slot whose first `cached` positions, whole chunks, are shared with others, with their thoughts."""
        while slot >= len(self._kept):
            self._kept = np.concatenate([self._kept, np.zeros_like(self._kept)])
            self._states, self._hidden = (torch.cat([x, torch.zeros_like(x)]) for x in (self._states, self._hidden))
        table = self._pages.tables[slot]
        ends = range(self.chunk - 1, cached, self.chunk)
        self.thoughts[slot] = [self._ends[int(table[end // PAGE])][end % PAGE] for end in ends]
        self._kept[slot] = len(ends) * self.chunk
        self._states[slot] = self._state(self.thoughts[slot])

    def copy(self, source: int, target: int) -> None:
        """Copy the thoughts of a page's positions when its entries are copied to another page."""
        if source in self._ends:
            self._ends[target] = list(self._ends[source])

    def reach(self, start: np.ndarray) -> np.ndarray:
        """Return the end of the chunk of each position, int64 [n]: no draft goes further."""
        ends: np.ndarray = (start // self.chunk + 1) * self.chunk
        return ends

    def states(self, slot: int) -> list[torch.Tensor]:
        """Return the state, float32 [chunk, hidden], of each chunk that was begun or comes next."""
        found = [self.thinker.state(())]
        for thought in self.thoughts[slot]:
            found.append(self.thinker.state(thought) if thought or not self.thinker.keeps else found[-1])
        return found

    @torch.inference_mode()
    def exchange(self, windows: Windows) -> Exchange:
        """Return the states for the rows of a pass, assuming that none of the chunks in which windows begin thinks."""
        positions = windows.positions
        slots, places = (
            torch.from_numpy(x).to(self._device)
            for x in (np.repeat(windows.slots, windows.lengths), positions % self.chunk)
        )
        states = self._states[slots, places]
        if not self.thinker.keeps:
            ahead = positions // self.chunk > np.repeat(windows.starts // self.chunk, windows.lengths)
            states[torch.from_numpy(ahead).to(self._device)] = 0
        return Exchange(self.thinker.inject, self.thinker.extract, states)

    @torch.inference_mode()
    def note(self, windows: Windows, hidden: torch.Tensor) -> None:
        """Store the rows of a pass that T reads, float32 [tokens, hidden], until `keep` or the next pass."""
        parts = hidden.split(windows.lengths.tolist())
        starts = zip(windows.starts.tolist(), parts, strict=True)
        self._windows = dict(zip(windows.slots.tolist(), starts, strict=True))

    @torch.inference_mode()
    def keep(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Keep the rows of the last pass up to a position of each slot; chunks that are then full think.

        Args:
            slots: int64 [n], without repetition.
            ends: int64 [n], positions.

        Returns:
            int64 [n], the end of valid rows: less than `ends` if a chunk thinks and others were read after it.
        """
        chunks: list[torch.Tensor] = []
        owners: list[int] = []
        kept = ends.copy()
        for i, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
            first = int(self._kept[slot])
            if end <= first:
                continue
            start, rows = self._windows[slot]
            rows = rows[first - start : end - start]
            inside = first % self.chunk
            if inside + len(rows) >= self.chunk:
                rows = torch.cat([self._hidden[slot, :inside], rows])
                whole = len(rows) // self.chunk
                chunks.append(rows[: whole * self.chunk].view(whole, self.chunk, -1))
                owners += whole * [i]
                rows, inside = rows[whole * self.chunk :], 0
            self._hidden[slot, inside : inside + len(rows)] = rows
            self._kept[slot] = end
        if chunks:
            thoughts = self.thinker.think(torch.cat(chunks), np.array(owners, np.int64))
            for i in dict.fromkeys(owners):
                found = [thought for owner, thought in zip(owners, thoughts, strict=True) if owner == i]
                kept[i] = self._settle(int(slots[i]), int(ends[i]), found)
        return kept

    def _settle(self, slot: int, end: int, found: list[Thought | None]) -> int:
        """Record the thoughts of a slot's chunks that were read; return the end of its valid rows."""
        known = self.thoughts[slot]
        table = self._pages.tables[slot]
        thinks = False
        for thought in found:
            if thought is None:
                break
            known.append(thought)
            last = len(known) * self.chunk - 1
            self._ends.setdefault(int(table[last // PAGE]), [()] * PAGE)[last % PAGE] = thought
            thinks = thought != ()
        if thinks:
            end = min(end, len(known) * self.chunk)
            self._kept[slot] = end
        if known[-1] or not self.thinker.keeps:
            self._states[slot] = self._state(known)
        return end

    def _state(self, thoughts: list[Thought]) -> torch.Tensor:
        """Return the state that these thoughts leave for the next chunk."""
        latest: Iterable[Thought] = reversed(thoughts)
        return self.thinker.state(next(filter(None, latest) if self.thinker.keeps else iter(latest), ()))
