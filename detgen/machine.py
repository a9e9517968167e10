"""What the operating system tells about this machine and this process. Imports nothing of detgen."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OF_A_DATABASE = 3  # files: the database, its log, and its folder while that is synced


class Device(NamedTuple):
    """A device that models run on.

    Attributes:
        type: "cpu" or "cuda".
        number: the index among several; None for the first, or the only one.
    """

    type: str
    number: int | None = None

    def __str__(self) -> str:
        return self.type if self.number is None else f"{self.type}:{self.number}"


CPU = Device("cpu")


def cpu_name() -> str:
    """Return the name of the processor's model, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def user_cache() -> Path:
    """Return the folder of the user's cache for detgen: `$XDG_CACHE_HOME/detgen`, or `~/.cache/detgen`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "detgen"


def usable_cores() -> int:
    """Return the number of processors that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def peak_memory() -> int:
    """Return the peak resident bytes of this process since `forget_peak_memory`; without /proc, since its start."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_memory() -> None:
    """Reset the peak of resident memory, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def on_network(path: Path) -> bool:
    """Return whether a file is on a network file system, as far as the system tells; the file need not exist."""
    with suppress(OSError):
        device = (path if path.exists() else path.parent).stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mounted, _, kind = line.partition(" - ")
            if mounted.split()[2] == number:
                return kind.split()[0].removeprefix("fuse.") in _NETWORKED
    return False


_NETWORKED = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("orangefs", "s3fs", "smb3", "smbfs", "sshfs", "virtiofs", "vboxsf"),
}


def no_file_left() -> OSError | None:
    """Return why this process cannot open as many files as a database needs, or None; SQLite itself does not say."""
    taken: list[int] = []
    try:
        while len(taken) < _OF_A_DATABASE:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error
    finally:
        for file in taken:
            os.close(file)
    return None


def size(number: float) -> str:
    """Return a number of bytes in words, such as `412.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.1f} {unit}" if unit != "bytes" else f"{number:.0f} bytes"
        number /= 1024
    return f"{number:.1f} GiB"
