"""The number of threads of the compiled library."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from detgen.machine import usable_cores

_own = threading.local()  # what each thread has asked for
_last: int | None = None  # what one of them has asked for last, which holds for those that have not


def use_threads(count: int | None) -> None:
    """Set the number of threads for passes of this thread, and for torch's operators in it if torch is loaded.

    Args:
        count: None leaves them as they are: as many as torch has; without it, `OMP_NUM_THREADS`, or one for each core
            that there is for this process.
    """
    global _last
    if count is not None:
        _own.count = _last = count
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # also a thread that has run no operator yet is to have them
        torch.set_num_threads(_asked() or torch.get_num_threads())


def threads() -> int:
    """Return the number of threads."""
    if (asked := _asked()) is not None:
        return asked
    told = getattr(sys.modules.get("torch"), "get_num_threads", None)  # which is not there while it is imported
    return _cores() if told is None else int(told())


def _asked() -> int | None:
    found: int | None = getattr(_own, "count", _last)
    return found


@cache
def _cores() -> int:
    with suppress(KeyError, ValueError):
        if (said := int(os.environ["OMP_NUM_THREADS"].partition(",")[0])) > 0:
            return said
    with suppress(OSError, AttributeError):  # of Linux
        folders = [Path(f"/sys/devices/system/cpu/cpu{number}/topology") for number in os.sched_getaffinity(0)]
        names = ("physical_package_id", "core_id")
        return len({tuple((folder / name).read_text() for name in names) for folder in folders})
    import psutil

    return psutil.cpu_count(logical=False) or usable_cores()
