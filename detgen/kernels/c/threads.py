"""How many threads the compiled library runs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

_asked: int | None = None


def use_threads(count: int | None) -> None:
    """Have passes run by so many threads, and torch's operators in this thread, if it is there.

    Args:
        count: None leaves them as they are: as many as torch has; without it, `OMP_NUM_THREADS`, or one for each core
            that there is for this process.
    """
    global _asked
    _asked = _asked if count is None else count
    torch = sys.modules.get("torch")
    if torch is not None:  # also a thread that has run no operator yet is to have them
        torch.set_num_threads(_asked or torch.get_num_threads())


def threads() -> int:
    """How many there are."""
    if _asked is not None:
        return _asked
    torch = sys.modules.get("torch")
    return _cores() if torch is None else int(torch.get_num_threads())


@cache
def _cores() -> int:
    with suppress(KeyError, ValueError):
        if (said := int(os.environ["OMP_NUM_THREADS"].partition(",")[0])) > 0:
            return said
    import psutil

    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(psutil.cpu_count(logical=False) or there, there), 1)
