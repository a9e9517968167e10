"""How samples whose tokens are known are read: which of their tokens go through which pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from detgen.kernels.input_batch import Window
from detgen.runner.block_manager import PAGE
from detgen.verify.replay.audited import Audited


@dataclass(slots=True)
class Reading:
    """A sample in a slot, and the tokens whose logits choose its completion.

    Attributes:
        audited: the sample.
        slot: its slot.
        tokens: all of its tokens but the last one.
        at: up to where they were read, where each sample has a position of its own.
        pauses: positions behind chunks that think, as far as the run says so, ascending.
    """

    audited: Audited
    slot: int
    tokens: list[int]
    at: int = 0
    pauses: list[int] = field(default_factory=list)

    def window(self, start: int, width: int) -> Window:
        """The next tokens; logits are wanted of those that choose a token of the completion."""
        part = self.tokens[start : start + width]
        first = self.audited.sequence.prompt_length - 1
        return Window(self.slot, start, part, max(min(start + len(part) - first, len(part)), 0))

    def place(self, window: Window) -> int:
        """The place in the completion of the first token that a window's logits choose."""
        return window.start + len(window.tokens) - window.logits - self.audited.sequence.prompt_length + 1


Pass = list[tuple[Reading, Window]]


def side_by_side(readings: list[Reading], most: int) -> Iterator[Pass]:
    """Passes that read samples, the longest first, all up to the same position before any goes on.

    The windows of a pass then begin at the same position. The rows that remain go to the next ones.
    """
    read: Pass = []
    remaining = most
    for reading, window in _windows(readings, most):
        if len(window.tokens) > remaining or any(r is reading for r, _ in read):
            yield read
            read, remaining = [], most
        read.append((reading, window))
        remaining -= len(window.tokens)
    if read:
        yield read


def _windows(readings: list[Reading], most: int) -> Iterator[tuple[Reading, Window]]:
    """All windows in the order in which they are read; the fewer samples go on, the longer, up to `most` tokens."""
    start = 0
    while readings:
        width = most // min(len(readings), -(-most // PAGE))
        for reading in readings:
            yield reading, reading.window(start, width)
        start += width
        readings = [r for r in readings if len(r.tokens) > start]


def up_to_thoughts(readings: list[Reading], most: int) -> Iterator[Pass]:
    """Passes that read samples of a model that thinks, each from where it stands up to its next thought.

    What the run says of its thoughts decides how far to read in one pass, and nothing else: a window that goes on
    behind a chunk that thinks after all is cut there, and `Reading.at` says so before the next pass is asked for.
    """
    while readings:
        read: Pass = []
        remaining = most
        for reading in readings:
            pause = next((p for p in reading.pauses if p > reading.at), len(reading.tokens))
            window = reading.window(reading.at, min(pause - reading.at, remaining))
            read.append((reading, window))
            remaining -= len(window.tokens)
            if not remaining:
                break
        yield read
        readings = [r for r in readings if r.at < len(r.tokens)]
