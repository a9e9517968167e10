"""Handling of the signals that ask the process to end: from Ctrl-C, `kill` and a closed terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals that ask the process to end inside the block, and restore the former handlers after it.

    A SIGHUP that is ignored stays ignored: that is what nohup asks for. Threads other than the main one never get a
    signal, so nothing changes there. A handler that a program embedding Python installed stays, since it could not be
    restored.
    """
    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            found = signal.getsignal(number)
            if found is not None and (number, found) != (signal.SIGHUP, signal.SIG_IGN):
                former[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, restored in former.items():
            signal.signal(number, restored)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Delay the signals until the end of the block, for imports: torch, numpy and transformers swallow them, or break.

    A handler delays them because another thread would still receive a signal that this thread masks.
    """
    pending: list[int] = []
    try:
        with ending_signals(lambda number, _: pending.append(number)):
            yield
    finally:
        for number in pending[:1]:
            signal.raise_signal(number)
