"""Measures the processor time of this process and its children, and that of other processes meanwhile.

psutil reports other processes and children that still run. A peer may run where it is not installed: then children
count once they have ended.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from typing import NamedTuple

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # the times of guests are also in those of users
_NOISE = 0.05  # seconds by which the system's figures may be off
_BUSY = 0.1  # share of the processors above which other processes deserve a warning


class CpuClock:
    """CPU seconds of this process, its threads and all processes that it started, from now on."""

    def __init__(self) -> None:
        self._children = _descendants_seconds()
        self._own = _own_seconds()

    def seconds(self) -> float:
        """Return the seconds since the clock was made."""
        own = _own_seconds()  # first, so that looking for children does not count
        return max(own - self._own + _descendants_seconds() - self._children, 0.0)


def _own_seconds() -> float:
    """Return the seconds of this process, and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def _descendants_seconds() -> float:
    """Return the seconds of this process's descendants that still run."""
    total = 0.0
    with suppress(Exception):  # psutil is not installed, or has no access
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # the child has ended
                total += sum(child.cpu_times()[:4])  # includes its own children that have ended
    return total


class Others(NamedTuple):
    """What other processes took of the processors that this one may use, during some time.

    Attributes:
        seconds: seconds of processor time; may be a few hundredths below 0 if there was nothing.
        there_were: available seconds of processor time, over all processors.
    """

    seconds: float
    there_were: float

    @property
    def share(self) -> float:
        """Share of the processors' time, from 0 to 1."""
        return min(max(self.seconds / self.there_were, 0.0), 1.0) if self.there_were else 0.0

    @property
    def disturb(self) -> bool:
        """Whether other processes took so much that measured speeds are not those of a quiet machine."""
        return self.seconds - _NOISE > _BUSY * self.there_were


class OthersClock:
    """Measures what other processes do from now on. A hypervisor that gives the time to others counts as one."""

    def __init__(self) -> None:
        self._cores = _cores()
        self._cpu = CpuClock()
        # Looking for children takes a while, so it is kept out of the timed span, here and below.
        self._busy = _busy_seconds(self._cores)
        self._started = time.perf_counter()

    def read(self) -> Others | None:
        """Return what other processes did since the clock was made; None if the system does not tell."""
        busy, wall = _busy_seconds(self._cores), time.perf_counter() - self._started
        own = self._cpu.seconds()
        if self._busy is None or busy is None:
            return None
        return Others(busy - self._busy - own, wall * len(self._cores))


def _cores() -> set[int]:
    allowed = getattr(os, "sched_getaffinity", None)  # not available everywhere
    return set(allowed(0)) if allowed else set(range(os.cpu_count() or 1))


def _busy_seconds(cores: set[int]) -> float | None:
    """Return the seconds that these processors have worked, for anybody, since the machine was started."""
    import psutil

    try:
        found = [times._asdict() for i, times in enumerate(psutil.cpu_times(percpu=True)) if i in cores]
    except Exception:  # psutil has no access
        return None
    # Some containers show zeros.
    return sum(of[name] for of in found for name in of if name not in _NOT_BUSY) or None
