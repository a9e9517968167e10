"""Memory for KV buffers (zeros that take none until written), and how much memory there is."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import resource
import sys
from typing import Any

import numpy as np

from detgen.errors import EngineError
from detgen.machine import Device
from detgen.program.arrays import Array, torch_dtype

_SHARE = 0.4  # of the free memory, unless the user gives a size
# A machine need not have room for all of a mapping, nor for a copy of it together with a copy of the process. Python
# names the flag from 3.13 on.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_LAZY = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
_OURS = getattr(mmap, "MADV_DONTFORK", None)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Array:
    """Return zeros, on CUDA as a tensor; on a CPU, the machine provides only the pages that are written.

    Forks of the process (`engine/bounded.py`) do not inherit them, or passes would have to copy the pages they write.

    Raises:
        EngineError: if there is not enough memory.
    """
    if device.type != "cpu":
        import torch

        return torch.zeros(shape, dtype=torch_dtype(dtype), device=str(device))
    count = math.prod(shape)
    if not count:
        return np.zeros(shape, dtype)
    try:
        pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _LAZY)
    except (OSError, ValueError, OverflowError) as e:
        size = count * dtype.itemsize / 2**20
        raise EngineError(
            f"no memory for a KV buffer of {size:,.0f} MiB ({e}); give the KV cache less with --kv-memory"
        ) from e
    if _OURS is not None:
        pages.madvise(_OURS)
    return np.frombuffer(pages, dtype, count).reshape(shape)


def give_back() -> None:
    """Return free memory between blocks in use to the machine; the GNU C library would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_room(mebibytes: int, purpose: str) -> None:
    """Raise if a limit on the process's address space (`ulimit -v`) leaves too little room for a purpose.

    Some libraries silently end the process by a signal if they get no memory.

    Raises:
        EngineError: if less is left.
    """
    left = _left()
    if left is not None and left < mebibytes << 20:
        raise EngineError(f"not enough memory to {purpose}, which takes at least {mebibytes} MiB") from MemoryError()


def _left() -> int | None:
    """Return the bytes that the process's address space may still grow by; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    import psutil

    return int(max(limit - psutil.Process().memory_info().vms, 0))


def free_memory(device: Device, mebibytes: int = 0) -> int:
    """Return the default size of the KV caches in bytes: a share of the free memory.

    A limit on the process's address space (`ulimit -v`) counts like the machine's memory. Memory that is never touched
    counts against it, too, so the `mebibytes` needed for other purposes are subtracted.
    """
    if device.type == "cuda":
        return int(_free(device) * 0.8)
    left = _left()
    free = _free(device)
    return int((free if left is None else min(free, max(left - (mebibytes << 20), 0))) * _SHARE)


def room_beside(device: Device, reserved: int) -> int:
    """Return the free bytes in addition to a KV cache that may grow to `reserved` bytes."""
    if device.type == "cuda":
        return _free(device)  # the cache has taken its bytes already
    left = _left()  # without what the cache has taken
    beside = _free(device) - reserved
    return beside if left is None else min(beside, left)


def _free(device: Device) -> int:
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(str(device))[0])
    import psutil  # machines with a GPU may lack it

    return int(psutil.virtual_memory().available)
