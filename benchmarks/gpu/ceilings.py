"""What the device can do at best: copies, matrix products; and what the host pays for a launch and for an answer."""

from __future__ import annotations

import time

import torch

from gpu.notebook import Asked, Notebook
from gpu.timing import device_seconds, host_seconds

_COPIED = (1 << 28, 1 << 30, 1 << 32)  # bytes, all more than an L2 cache
_SIZES = (4096, 8192)  # of square matrices
_LAUNCHES = 1000
_ROWS, _VOCABULARY = 256, 128256  # of the logits of a batch


def copy_rate(size: int, device: str) -> float:
    """Bytes per second of a copy of `size` bytes, read and written."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: target.copy_(source))


def product_rate(size: int, dtype: torch.dtype, device: str) -> float:
    """Operations per second of a product of square matrices of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / device_seconds(lambda: torch.mm(a, b, out=out))


def roof(asked: Asked, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy and operations per second of a product, for shares of them."""
    if asked.tiny:
        return copy_rate(1 << 20, asked.device), product_rate(64, dtype, asked.device)
    return copy_rate(_COPIED[1], asked.device), product_rate(_SIZES[1], dtype, asked.device)


def measure(book: Notebook, asked: Asked) -> None:
    """All of it."""
    for size in (1 << 20,) if asked.tiny else _COPIED:
        with book.part(f"copy of {size} bytes"):
            rate = copy_rate(size, asked.device)
            book.note(f"copy {size}", rate, f"copy of {size >> 20:,} MiB: {rate / 1e12:.3f} TB/s, read and written")
    for dtype in (torch.bfloat16, torch.float16):
        for size in (64,) if asked.tiny else _SIZES:
            name = f"{str(dtype).rpartition('.')[2]} product of {size:,} x {size:,}"
            with book.part(name):
                rate = product_rate(size, dtype, asked.device)
                book.note(name, rate, f"{name}: {rate / 1e12:.1f} TFLOP/s")
    with book.part("host"):
        _host(book, asked)


def _host(book: Notebook, asked: Asked) -> None:
    x = torch.zeros(64, device=asked.device)
    host_seconds(lambda: x.add_(1), 3)
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        x.add_(1)
    launch = (time.perf_counter() - started) / _LAUNCHES
    answer = host_seconds(lambda: x[0].item(), 50)
    rows, width = (4, 64) if asked.tiny else (_ROWS, _VOCABULARY)
    logits = torch.zeros(rows, width, device=asked.device)
    copied = host_seconds(lambda: logits.cpu(), 3)
    found = {"launch": launch, "answer": answer, "logits": copied}
    line = f"a launch {1e6 * launch:.1f} us, a number from the device {1e6 * answer:.1f} us, "
    book.note("host", found, line + f"float32 logits {rows} x {width:,} from the device {1e3 * copied:.1f} ms")
