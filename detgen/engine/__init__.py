"""The loop and what it holds: requests, scheduler, canonical pass, KV cache, verification. Knows no files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detgen.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Lazily: the plain data beside the engine is wanted where torch is not.
    if name == "Engine":
        with _interrupted_later():
            from detgen.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C takes effect behind: torch and numpy swallow it while they are imported, or break."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
