"""The limits of the device: copies, matrix products; and the host's cost of a launch and of an answer."""

from __future__ import annotations

import time

import torch

from detgen.bench.roofline import measure_roof
from gpu.notebook import Asked, Notebook
from gpu.timing import host_seconds

_LAUNCHES = 1000
_ROWS, _VOCABULARY = 256, 128256  # of the logits of a batch


def roof(asked: Asked, dtype: str) -> tuple[float, float]:
    """Return bytes per second of a copy and operations per second of a product, as limits for others."""
    found = measure_roof(asked.device, dtype, torch.get_num_threads())
    return found["copy_bytes"], found["product_operations"]


def measure(book: Notebook, asked: Asked) -> None:
    """Measure all of them."""
    for dtype in ("float32",) if asked.tiny else ("bfloat16", "float16"):
        with book.part(dtype):
            copied, rate = roof(asked, dtype)
            line = f"a copy {copied / 1e12:.3f} TB/s, read and written; {dtype} products {rate / 1e12:.1f} TFLOP/s"
            book.note(dtype, {"copy": copied, "product": rate}, line)
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
