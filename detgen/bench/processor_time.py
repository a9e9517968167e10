"""Processor time: what this process and its children took of it, and what others took meanwhile.

On Linux all of it is read from /proc; elsewhere from psutil where that is installed. Where neither is there, children
that still run are left out and nothing is known of others.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds; the unit of /proc
_IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk
_STOLEN = 7  # the last column that counts, what a hypervisor gave to others; later ones are counted already
_NOISE = 0.05  # seconds that what is read from /proc may be off by
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
    if not (PROC / "stat").exists():
        return _descendants_by_psutil()
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for entry in os.scandir(PROC):
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                # The name of its program, in parentheses, may hold anything.
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                children[int(fields[1])].append(int(entry.name))
                seconds[int(entry.name)] = sum(map(int, fields[11:15])) * _TICK  # with its own that have ended
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        found = children[waiting.pop()]
        total += sum(seconds[each] for each in found)
        waiting += found
    return total


def _descendants_by_psutil() -> float:
    total = 0.0
    with suppress(Exception):  # it is not installed, or may not look
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                total += sum(child.cpu_times()[:4])
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
    total = 0.0
    try:
        lines = (PROC / "stat").read_text().splitlines()
    except OSError:
        return _busy_by_psutil(cores)
    for line in lines:
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            total += sum(int(n) for i, n in enumerate(columns[: _STOLEN + 1]) if i not in _IDLE) * _TICK
    return total or None  # some containers show zeros


def _busy_by_psutil(cores: set[int]) -> float | None:
    try:
        import psutil

        found = [times for i, times in enumerate(psutil.cpu_times(percpu=True)) if i in cores]
    except Exception:  # it is not installed, or may not look
        return None
    return sum(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system")) for times in found)
