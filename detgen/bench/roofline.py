"""The limits of this machine: bytes per second of a copy, operations per second of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from detgen.bench.bench_results import Row

if TYPE_CHECKING:
    import torch

_SECONDS = 0.3  # least time spent on each thing that is timed
_LEAST = 5  # least number of times that it is timed, however long that takes
_CPU_BYTES, _CUDA_BYTES = 1 << 28, 1 << 30  # bytes to copy
_LARGEST = 8192  # rows and columns of the largest product
_LONG = 0.02  # seconds of a product above which a larger one is no faster

# Bytes of a weight in each precision, including its share of its block's scale.
_WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 36 / 32,
    "q8": 34 / 32,
    "q8_0": 34 / 32,
    "q4": 18 / 32,
    "q4_0": 18 / 32,
    "q4_k": 18 / 32,
    "nf4": 20 / 32,
}

_BOUNDS = (
    ("copy_bytes", "bandwidth_share", "a copy", "GB/s"),
    ("product_operations", "arithmetic_share", "a matrix product", "GFLOP/s"),
)
Roof = dict[str, float]
"""`copy_bytes` per second, read and written; `product_operations` per second, multiplications and additions."""


def measure_roof(device: str, dtype: str, threads: int) -> Roof:
    """Measure both limits, taking the best of several tries; the copy is timed before and after the products."""
    import torch

    torch.set_num_threads(threads)
    count = _CUDA_BYTES if device.startswith("cuda") else _CPU_BYTES
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = [_best(lambda: target.copy_(source), device)]
    operations, size, taken = 0.0, 256, 0.0
    while taken < _LONG and size < _LARGEST:
        size *= 2
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        taken = min(_best(product, device) for product in _products(a, b))
        operations = max(operations, 2 * size**3 / taken)
    copied.append(_best(lambda: target.copy_(source), device))
    return {"copy_bytes": 2 * source.numel() / min(copied), "product_operations": operations}


def _products(a: torch.Tensor, b: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """Return ways to multiply two matrices; which one is the fastest depends on the processor."""
    import torch

    from detgen.kernels.c.modules import NativeLinear

    out = torch.empty_like(a)
    found: list[Callable[[], torch.Tensor]] = [lambda: torch.matmul(a, b, out=out)]
    if a.device.type == "cpu" and a.dtype == torch.float32:
        packed = NativeLinear(b)
        found.append(lambda: packed(a))
    return found


def _best(function: Callable[[], object], device: str) -> float:
    """Return the fewest seconds of a call. A first call is not timed: untouched memory is many times as slow."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - started

    timed()
    until = time.perf_counter() + _SECONDS
    best, times = float("inf"), 0
    while times < _LEAST or time.perf_counter() < until:
        best, times = min(best, timed()), times + 1
    return best


def place_all(rows: list[Row], weights: float | None, roof: Roof, dtype: str) -> tuple[Roof, list[str]]:
    """Fill in the shares of all measured rows; return the bounds that hold, and a note for each that does not.

    A figure that a row exceeds is not a bound: the copy or the product was disturbed, or weights are read from the
    caches. Then no row has a share of it.

    Args:
        rows: rows, changed in place.
        weights, roof, dtype: as for `place_under_roof`; the weights may be None, the roof empty.
    """
    measured = [row for row in rows if row.seconds]
    if not roof:
        return roof, []
    if weights is None:
        return roof, ["each token takes some of the model's experts: no shares of bandwidth and arithmetic are given"]
    for row in measured:
        place_under_roof(row, median(row.seconds), weights, roof, dtype)
    bounds, notes = dict(roof), []
    for key, share, name, unit in _BOUNDS:
        most = max(measured, key=lambda row: getattr(row, share) or 0.0, default=None)
        if most is None or (getattr(most, share) or 0.0) <= 1:
            continue
        reached = getattr(most, share) * bounds.pop(key)
        notes.append(
            f"{name} reached {roof[key] / 1e9:,.1f} {unit} when the machine was measured, but {most.label} reaches"
            f" {reached / 1e9:,.1f}: it is not a bound, so no shares of it are given"
        )
        for row in measured:
            setattr(row, share, None)
    return bounds, notes


def place_under_roof(row: Row, seconds: float, weights: float, roof: Roof, dtype: str) -> None:
    """Fill in a row's shares, from the bytes of the weights that its passes read and the arithmetic of its tokens.

    Bytes exclude caches and activations, arithmetic excludes drafts and padding. A row in another precision than the
    product has no share of it.

    Args:
        row: row, changed in place.
        seconds: seconds of a run.
        weights: number of weights that each pass reads and each token is multiplied by.
        roof: result of `measure_roof`.
        dtype: number format in which the roof was measured.
    """
    each = _WEIGHT_BYTES.get(row.weights or row.precision)
    if each is not None and row.passes is not None:
        row.bandwidth_share = row.passes * weights * each / seconds / roof["copy_bytes"]
    if row.precision == dtype:
        tokens = row.prompt_tokens + row.output_tokens
        row.arithmetic_share = 2 * weights * tokens / seconds / roof["product_operations"]
