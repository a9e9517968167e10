"""Memory for weights in huge pages, where the system supports them.

A pass of few rows spends its time reading weights. On two cores of an AMD EPYC it reads 62 GB/s from pages of 2 MiB and
35 from pages of 4 KiB, which Linux gives to processes that do not ask (`transparent_hugepage`: madvise).
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np

_CHUNK = 32 << 20  # least bytes to ask for at once; memory that is never written takes no space
_LINE = 64  # bytes of a cache line
_THERE = hasattr(mmap, "MADV_HUGEPAGE")

_lock = Lock()
_rest = memoryview(b"")


def empty(*shape: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialized array that shares huge pages with the arrays made before and after it.

    Its memory is freed only with theirs, so use it for long-lived arrays.
    """
    global _rest
    size = math.prod(shape) * dtype.itemsize
    if not _THERE or not size:
        return np.empty(shape, dtype)
    with _lock:
        try:
            found = _rest if size <= len(_rest) else memoryview(_mapped(max(size, _CHUNK)))
        except OSError:  # there may be memory for this array; otherwise numpy raises
            return np.empty(shape, dtype)
        own, left = found[:size], found[-(-size // _LINE) * _LINE :]
        if found is _rest or len(left) > len(_rest):
            _rest = left
    return np.frombuffer(own, dtype).reshape(shape)  # keeps the memory alive


def _mapped(size: int) -> mmap.mmap:
    """Map memory that is aligned to huge pages."""
    found = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # on systems without huge pages
        found.madvise(mmap.MADV_HUGEPAGE)
    return found
