"""Ctrl-C while libraries are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C inside takes effect behind: torch, numpy and transformers swallow it while they are imported, or break.

    A handler holds it back, not a signal mask, past which another thread would take it.
    """
    # Other threads are never interrupted; a handler that is none of Python's could not be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pending: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if pending:
            signal.raise_signal(signal.SIGINT)
