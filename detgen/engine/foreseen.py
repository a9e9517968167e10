"""Plans the passes of a call that run before the host reads the first: which sequences take part, and what they read.

They have the rows that rounds would have, except that no request is admitted in between, and that a round is one pass
even where rows for prompts make it longer than others. Affects only speed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from detgen.engine.scheduler import Scheduler
from detgen.kernels.input_batch import Window, Windows

_SPARED = 16  # live sequences per one that may end before a call is over, while others wait for its slot


class Call(NamedTuple):
    """Consecutive passes in which sequences continue with the tokens that they choose.

    Attributes:
        first: the windows of the first pass.
        later: the chunks of prompts that join each later pass.
        reads: the tokens of all chunks but the last of each prompt, pass by pass.
        slots: int64 [n], the sequences that choose, in the order in which they begin.
        lengths: int64 [n], the number of passes in which each chooses.
    """

    first: Windows
    later: list[Windows]
    reads: Windows
    slots: np.ndarray
    lengths: np.ndarray


def foresee(scheduler: Scheduler, windows: Windows, most: int, *, goes_on: bool) -> Call:
    """Plan the next passes, at most `most`.

    A sequence takes part up to its limit and to the end of its pages.

    Args:
        scheduler: has the live sequences.
        windows: the last tokens of the sequences that decode.
        most: see `Policy.chain_length`.
        goes_on: whether to continue after all prompts have been read.
    """
    live, cached = scheduler.live, scheduler.live.cached.copy()
    slots, begins = windows.slots, np.zeros(len(windows), np.int64)
    chunks: list[list[Window]] = []
    most = 1 if scheduler.expected else most
    while True:
        left = live.limit[slots] - live.length[slots]
        if scheduler.waiting and len(slots):
            most = min(most, int(np.sort(begins + left)[len(slots) // _SPARED]))
        lengths = np.minimum(left, scheduler.room(slots) + 1)
        step = len(chunks)
        decoding = int((begins + lengths > step).sum())
        if step >= most or not (chunk := scheduler.chunks(scheduler.free(decoding), decoding, cached)):
            break
        chunks.append(chunk)
        for window in chunk:
            cached[window.slot] += len(window.tokens)
        read = np.array([window.slot for window in chunk if window.logits], np.int64)
        slots, begins = np.append(slots, read), np.append(begins, np.full(len(read), step))
    lengths = np.minimum(lengths, (most if goes_on else len(chunks)) - begins)
    first, *later = map(Windows.of, chunks or [[]])
    parts = ((w, w.tokens[: len(w.tokens) - w.logits]) for chunk in chunks for w in chunk)
    reads = Windows.of(Window(w.slot, w.start, tokens, 0) for w, tokens in parts if tokens)
    return Call(windows.joined(first) if chunks else windows, later, reads, slots, lengths)
