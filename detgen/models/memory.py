"""Memory for KV buffers: zeros that take none until they are written; and how much there is."""

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

_SHARE = 0.4  # of the free memory, unless the user says how much
# A machine need not have room for all of a mapping, nor for a copy of it beside a copy of the process. Python names the
# flag from 3.13 on.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_LAZY = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
_OURS = getattr(mmap, "MADV_DONTFORK", None)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Array:
    """Zeros, on CUDA as a tensor; on a CPU, only the pages that are written are ever taken from the machine.

    Copies of the process (`engine/bounded.py`) do not have them: else passes would have to copy the pages they write.

    Raises:
        EngineError: if there is no such memory.
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
    """Give the machine what is free between what is in use; the GNU C library keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_room(mebibytes: int, purpose: str) -> None:
    """Refuse to begin what a limit on the process's address space (`ulimit -v`) leaves no room for.

    Some libraries end the process by a signal if they get no memory, without a word.

    Raises:
        EngineError: less is left.
    """
    left = _left()
    if left is not None and left < mebibytes << 20:
        raise EngineError(f"not enough memory to {purpose}, which takes at least {mebibytes} MiB") from MemoryError()


def _left() -> int | None:
    """Bytes that may still be added to the process's address space; None for any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    import psutil

    return int(max(limit - psutil.Process().memory_info().vms, 0))


def free_memory(device: Device, mebibytes: int = 0) -> int:
    """Bytes for the KV caches where the user does not say how many: a share of what is free.

    A limit on the process's address space (`ulimit -v`) counts like the machine's memory. There, what is never touched
    counts too, so the `mebibytes` that are needed besides are left out.
    """
    if device.type == "cuda":
        return int(_free(device) * 0.8)
    left = _left()
    free = _free(device)
    return int((free if left is None else min(free, max(left - (mebibytes << 20), 0))) * _SHARE)


def room_beside(device: Device, reserved: int) -> int:
    """Bytes that are free beside what a KV cache of so many bytes may come to take."""
    if device.type == "cuda":
        return _free(device)  # it has taken them
    left = _left()  # which it has taken
    beside = _free(device) - reserved
    return beside if left is None else min(beside, left)


def _free(device: Device) -> int:
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(str(device))[0])
    import psutil  # which machines lent for a GPU may lack

    return int(psutil.virtual_memory().available)
