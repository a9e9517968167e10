"""Who may generate: one call at a time on one set of models.

Calls from several threads wait for each other, first come, first served. A call inside another one, in the thread that
reads the other's stream, would wait for ever and is refused instead. Between two rounds a stream stands still while its
reader does something else; as long as it is read on, others wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from detgen.errors import EngineError

_PATIENCE = 30.0  # seconds for which others wait for a stream that is not read
_LOOK = 0.5  # seconds between two looks at who has the turn


class Turn:
    """The right to generate, from `Turns.take` to `Turns.give_back`."""

    __slots__ = ("still", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.still: float | None = None

    def pause(self) -> None:
        """Note that a stream hands something to its reader."""
        self.still = time.monotonic()

    def go_on(self) -> None:
        """Note that its reader, perhaps in another thread by now, wants more."""
        self.thread = threading.get_ident()
        self.still = None


class Turns:
    """Gives turns, one after the other. Shared by all engines on the same models."""

    def __init__(self) -> None:
        # Reentrant: a stream may be collected, and end its turn, wherever Python collects garbage.
        self._changed = threading.Condition(threading.RLock())
        self._holder: Turn | None = None
        self._queue: deque[Turn] = deque()

    def take(self) -> Turn:
        """Wait for a turn.

        Raises:
            EngineError: if this thread has the turn already, or whoever has it has stopped reading.
        """
        mine = Turn()
        with self._changed:
            self._queue.append(mine)
            try:
                while self._holder is not None or self._queue[0] is not mine:
                    self._check(mine)
                    self._changed.wait(_LOOK)
                self._holder = mine
            finally:
                self._queue.remove(mine)
                self._changed.notify_all()
        return mine

    def _check(self, mine: Turn) -> None:
        holder = self._holder
        if holder is None:
            return
        if holder.thread == mine.thread:
            raise EngineError(
                "this engine is generating already: read its stream to the end, or close it, before the next call; "
                "engines made by with_settings share their models and take turns too"
            )
        still = holder.still
        if still is not None and time.monotonic() - still > _PATIENCE:
            raise EngineError(
                f"another thread has an open stream of this engine that has not been read for {_PATIENCE:.0f} seconds: "
                "read it to the end, or close it"
            )

    def give_back(self, turn: Turn) -> None:
        """End a turn; the next one in the queue has it."""
        with self._changed:
            if self._holder is turn:
                self._holder = None
            self._changed.notify_all()
