"""The live sequences as a structure of arrays, indexed by slot, so that a round needs no Python loop over them.

Knows no passes and no pages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import numpy as np

from detgen.engine.sequence import Sequence
from detgen.kernels.sampling import ARRAYS, Choice

_ROOM = 16  # slots to make room for at first
_THINKS = 0.5  # assumed share of chunks that think, before anything is known of a sequence


class RunningBatch:
    """Sequences that have a slot. All arrays are indexed by slot; for free slots, only `busy` is meaningful.

    Attributes:
        busy: bool, whether the slot is taken.
        reading: bool, whether some of the tokens have not been read yet.
        verified: bool, whether the request's tokens are verified.
        choosy: bool, whether its tokens are sampled, or chosen from adjusted logits.
        watched: bool, whether anything besides an end-of-sequence token and the limit can end it.
        eos: bool, whether end-of-sequence tokens end it.
        wordy: bool, whether the request asks for log-probabilities.
        likely: int64, for how many of the most likely tokens.
        adjusted: bool, whether its tokens are chosen from adjusted logits.
        formed: bool, whether its text must have a form.
        masked: bool, whether whole masks are needed for it.
        how: how its tokens are chosen, by the names of the arrays of `Choices`, except for the position.
        order: int64, its place among all sequences: the greatest is the youngest.
        last: int64, the last committed token.
        length: int64, prompt and committed tokens.
        prompt: int64, tokens of the prompt.
        limit: int64, most tokens of prompt and completion together.
        least: int64, tokens of the completion before any may end it.
        cached: int64, leading positions whose KV entries are canonical.
        rounds: int64, passes that committed tokens of it.
        thinks: float64, share of the last chunks that thought, for a thinking model.
        texts: list, its tokens.
        eos_ids: int64 [n, 1], the end-of-sequence tokens of all sequences that are not watched.
    """

    _ARRAYS = (
        *(
            (name, np.bool_)
            for name in (
                "busy",
                "reading",
                "verified",
                "choosy",
                "watched",
                "eos",
                "wordy",
                "adjusted",
                "formed",
                "masked",
            )
        ),
        *((name, np.int64) for name in ("order", "last", "length", "prompt", "limit", "least", "cached", "likely")),
        ("rounds", np.int64),
        ("thinks", np.float64),
        ("texts", np.object_),
    )
    busy: np.ndarray
    reading: np.ndarray
    verified: np.ndarray
    choosy: np.ndarray
    watched: np.ndarray
    eos: np.ndarray
    wordy: np.ndarray
    adjusted: np.ndarray
    formed: np.ndarray
    masked: np.ndarray
    order: np.ndarray
    last: np.ndarray
    length: np.ndarray
    prompt: np.ndarray
    limit: np.ndarray
    least: np.ndarray
    cached: np.ndarray
    likely: np.ndarray
    rounds: np.ndarray
    thinks: np.ndarray
    texts: np.ndarray

    def __init__(self) -> None:
        for name, dtype in self._ARRAYS:
            setattr(self, name, np.zeros(_ROOM, dtype))
        self.how = {name: np.zeros(_ROOM, dtype) for name, dtype in ARRAYS.items() if name != "position"}
        self._sequences: dict[int, Sequence] = {}
        self._eos: frozenset[int] = frozenset()
        self.eos_ids = np.zeros((0, 1), np.int64)
        self._free: list[int] = []  # slots that were taken once, as a heap
        self._slots = 0  # slots that were ever taken

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order in which they took their slots."""
        return iter(self._sequences.values())

    def __getitem__(self, slot: int) -> Sequence:
        return self._sequences[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._sequences

    def add(self, seq: Sequence) -> int:
        """Give a sequence the lowest free slot, with nothing cached.

        Returns:
            The slot.
        """
        slot = heapq.heappop(self._free) if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        if slot == len(self.busy):
            for name, dtype in self._ARRAYS:
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(len(old), dtype)]))
            self.how = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self.how.items()}
        seq.slot = slot
        params = seq.request.params
        self.busy[slot] = self.reading[slot] = True
        self.verified[slot] = params.deterministic
        self.choosy[slot] = seq.choosy
        if not self._sequences and seq.eos != self._eos:
            self._eos, self.eos_ids = seq.eos, np.array(sorted(seq.eos), np.int64)[:, None]
        self.watched[slot] = bool(params.stop or params.stop_token_ids or seq.eos != self._eos)
        self.eos[slot] = not params.ignore_eos
        self.wordy[slot], self.likely[slot] = params.logprobs is not None, params.logprobs or 0
        self.adjusted[slot] = seq.adjusted
        self.formed[slot], self.masked[slot] = seq.structure is not None, seq.masked
        choice = Choice.of(params, seq.sample)
        for name, values in self.how.items():
            values[slot] = getattr(choice, name)
        self.order[slot] = seq.order
        self.last[slot], self.length[slot] = seq.tokens[-1], len(seq.tokens)
        self.prompt[slot], self.limit[slot] = seq.prompt_length, seq.limit
        self.least[slot] = seq.least
        self.cached[slot] = 0
        self.rounds[slot] = seq.rounds
        self.thinks[slot] = _THINKS
        self.texts[slot] = seq.tokens
        self._sequences[slot] = seq
        return slot

    def remove(self, slot: int) -> Sequence:
        """Free a slot and return its sequence."""
        seq = self._sequences.pop(slot)
        seq.slot = -1
        seq.rounds = int(self.rounds[slot])
        self.busy[slot] = False
        self.texts[slot] = None
        heapq.heappush(self._free, slot)
        return seq

    def decoding(self) -> np.ndarray:
        """Slots, int64 [n], of the sequences that have read all their tokens."""
        slots: np.ndarray = (self.busy & ~self.reading).nonzero()[0]
        return slots

    def still_reading(self) -> np.ndarray:
        """Slots, int64 [n], of the sequences that have tokens to read."""
        slots: np.ndarray = (self.busy & self.reading).nonzero()[0]
        return slots

    def youngest(self) -> int:
        """Return the slot of the sequence that comes last in the order of the requests."""
        slots = np.flatnonzero(self.busy)
        return int(slots[self.order[slots].argmax()])

    def commit(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray, rounds: np.ndarray | int = 1) -> None:
        """Append committed tokens.

        Args:
            slots: int64 [n], each once.
            counts: int64 [n], the number of tokens of each, at least one.
            tokens: int64 [sum of counts], in the order of the slots.
            rounds: int64 [n], the number of rounds that this took.
        """
        ends = counts.cumsum()
        self.last[slots] = tokens[ends - 1]
        self.length[slots] += counts
        self.rounds[slots] += rounds
        self.reading[slots] = False
        texts = self.texts[slots].tolist()
        if len(tokens) == len(slots):
            deque(map(list.append, texts, tokens.tolist()), maxlen=0)
        else:
            deque(map(list.extend, texts, (part.tolist() for part in np.split(tokens, ends[:-1]))), maxlen=0)
