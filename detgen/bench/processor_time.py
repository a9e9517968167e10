"""Processor time: what this process and its children took of it, and what others took meanwhile.

Of others and of children that still run psutil tells. A peer may run where that is not installed: then children count
once they have ended.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from typing import NamedTuple

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # times of guests are in those of users, too
_NOISE = 0.05  # seconds that what the system tells may be off by
_BUSY = 0.1  # share of the processors from which others' work is worth a warning


class CpuClock:
    """CPU seconds of this process, its threads and all processes that it started, from here on."""

    def __init__(self) -> None:
        self._children = _descendants_seconds()
        self._own = _own_seconds()

    def seconds(self) -> float:
        """Those since the clock was made."""
        own = _own_seconds()  # first, so that looking for children does not count
        return max(own - self._own + _descendants_seconds() - self._children, 0.0)


def _own_seconds() -> float:
    """Of this process, and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def _descendants_seconds() -> float:
    """Of the processes that this one started, and of those that they did, as far as they run still."""
    total = 0.0
    with suppress(Exception):  # psutil is not installed, or may not look
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                total += sum(child.cpu_times()[:4])  # with its own that have ended
    return total


class Others(NamedTuple):
    """What other processes took of the processors that this one may use, within some time.

    Attributes:
        seconds: of processor time; a few hundredths below 0 where there was nothing.
        there_were: seconds of processor time that there were, all processors together.
    """

    seconds: float
    there_were: float

    @property
    def share(self) -> float:
        """Of the processors' time, from 0 to 1."""
        return min(max(self.seconds / self.there_were, 0.0), 1.0) if self.there_were else 0.0

    @property
    def disturb(self) -> bool:
        """Whether it is so much that speeds measured meanwhile are not those of a quiet machine."""
        return self.seconds - _NOISE > _BUSY * self.there_were


class OthersClock:
    """Takes what other processes do from here on. A hypervisor that gives the time to others counts as one."""

    def __init__(self) -> None:
        self._cores = _cores()
        self._cpu = CpuClock()
        # Looking for children takes a while, so it stands outside of what is timed, here and below.
        self._busy = _busy_seconds(self._cores)
        self._started = time.perf_counter()

    def read(self) -> Others | None:
        """What they did since the clock was made; None where the system does not tell."""
        busy, wall = _busy_seconds(self._cores), time.perf_counter() - self._started
        own = self._cpu.seconds()
        if self._busy is None or busy is None:
            return None
        return Others(busy - self._busy - own, wall * len(self._cores))


def _cores() -> set[int]:
    allowed = getattr(os, "sched_getaffinity", None)  # not everywhere
    return set(allowed(0)) if allowed else set(range(os.cpu_count() or 1))


def _busy_seconds(cores: set[int]) -> float | None:
    """Seconds that these processors have worked, for anybody, since the machine was started."""
    import psutil

    try:
        found = [times._asdict() for i, times in enumerate(psutil.cpu_times(percpu=True)) if i in cores]
    except Exception:  # whatever it says where it may not look
        return None
    # Some containers show zeros.
    return sum(of[name] for of in found for name in of if name not in _NOT_BUSY) or None
