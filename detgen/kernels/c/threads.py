"""How many threads the compiled library runs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from detgen.machine import usable_cores

_asked: int | None = None


def use_threads(count: int | None) -> None:
    """Have passes run by so many threads, and torch's operators in this thread, if it is there.

    Args:
        count: None leaves them as they are: as many as torch has; without it, `OMP_NUM_THREADS`, or one for each core
            that there is for this process.
    """
    global _asked
    _asked = _asked if count is None else count
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # also a thread that has run no operator yet is to have them
        torch.set_num_threads(_asked or torch.get_num_threads())


def threads() -> int:
    """How many there are."""
    if _asked is not None:
        return _asked
    told = getattr(sys.modules.get("torch"), "get_num_threads", None)  # which is not there while it is imported
    return _cores() if told is None else int(told())


@cache
def _cores() -> int:
    with suppress(KeyError, ValueError):
        if (said := int(os.environ["OMP_NUM_THREADS"].partition(",")[0])) > 0:
            return said
    import psutil

    there = usable_cores()
    return min(psutil.cpu_count(logical=False) or there, there)
