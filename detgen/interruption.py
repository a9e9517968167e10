"""Ctrl-C while libraries are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: torch, numpy and transformers swallow it during import, or break.

    A handler delays it, since another thread would still receive a signal that this one masks.
    """
    # Other threads are never interrupted; a handler that Python did not install cannot be restored.
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
