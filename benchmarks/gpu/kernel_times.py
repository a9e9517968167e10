"""Times of detgen's kernels: attention as a share of the copy bandwidth, the linear layer beside the vendor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from detgen.bench.random_weights import settings_of
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.triton.gate import gate
from detgen.kernels.triton.linear import linear
from detgen.kernels.triton.norm import norm
from detgen.kernels.triton.rotate import rotate
from gpu.ceilings import roof
from gpu.notebook import Asked, Notebook
from gpu.numerics import settle
from gpu.paged import Cache, Packed, attend_rows
from gpu.products import calls, random, shapes_of
from gpu.timing import copies, seconds_each

# Requests, positions of each, and rows of each.
_ATTENDED = ((1, 1024, 1), (64, 1024, 1), (64, 4096, 1), (1, 32768, 1), (64, 4096, 4), (1, 2048, 2048))
_MULTIPLIED = (1, 16, 64, 128, 256, 512)  # rows
_ROWS = (1, 64, 256, 2048)


class Times:
    """Measures and notes.

    Args:
        book: takes what is found.
        asked: what the stage was asked.

    Attributes:
        dtype: of all operands.
    """

    def __init__(self, book: Notebook, asked: Asked) -> None:
        self.book, self.tiny, self.device = book, asked.tiny, asked.device
        self.dtype = torch.float32 if asked.tiny else torch.bfloat16
        settings = settings_of(asked.model)
        self.shapes = shapes_of(settings)
        heads = settings["num_attention_heads"]
        self.heads, self.kv_heads = heads, settings["num_key_value_heads"]
        self.size = settings.get("head_dim") or settings["hidden_size"] // heads
        self.bandwidth, self.rate = roof(asked, self.dtype)
        roofs = {"copy": self.bandwidth, "product": self.rate}
        line = f"{self.dtype}: copy {self.bandwidth / 1e12:.3f} TB/s, product {self.rate / 1e12:.1f} TFLOP/s"
        book.note("roof", roofs, line)

    def note(self, name: str, seconds: float, moved: int, operations: float = 0) -> None:
        """Keep a time beside what moving so many bytes and computing so much takes at best."""
        floor = max(moved / self.bandwidth, operations / self.rate)
        found: dict[str, Any] = {"seconds": seconds, "bytes": moved, "operations": operations, "share": floor / seconds}
        what = "bandwidth" if moved / self.bandwidth == floor else "product rate"
        self.book.note(name, found, f"{name}: {1e6 * seconds:.1f} us, {floor / seconds:.0%} of the {what}")

    def random(self, *shape: int) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)


def measure(book: Notebook, asked: Asked) -> None:
    """The times, those of attention first."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    settle(asked)
    times = Times(book, asked)
    for requests, positions, rows in ((1, 70, 1), (2, 65, 2)) if asked.tiny else _ATTENDED:
        with book.part(f"attention of {requests} x {positions}, {rows} rows"):
            _attention(times, requests, positions, rows)
    for count in (1, 2) if asked.tiny else _ROWS:
        with book.part(f"{count} rows"):
            _rowwise(times, count)
    for part in ("o",) if asked.tiny else ("qkv", "o", "gate+up", "down"):
        with book.part(f"linear {part}"):
            _linear(times, part)


def _attention(times: Times, requests: int, positions: int, rows: int) -> None:
    """The last rows of some requests; each call has keys and values of its own."""
    of_cache = 2 * requests * positions * times.kv_heads * times.size * times.dtype.itemsize
    caches = [
        Cache.of([positions] * requests, times.kv_heads, times.size, times.dtype, times.device, seed)
        for seed in range(copies(of_cache, tiny=times.tiny, most=32))
    ]
    at = [(slot, positions - i) for slot in range(requests) for i in range(rows, 0, -1)]
    packed = Packed.of(at, times.heads // times.kv_heads, times.device)
    queries = times.random(len(at), times.heads, times.size)
    traits = AttentionTraits(times.size**-0.5)

    def call(cache: Cache) -> Callable[[], torch.Tensor]:
        return lambda: attend_rows(cache, queries, packed, traits)

    seconds = seconds_each([call(cache) for cache in caches])
    seen = sum(position + 1 for _, position in at)
    name = f"attention, {requests} x {positions:,} positions, {rows} row{'s' * (rows > 1)} of each"
    times.note(name, seconds, of_cache + 2 * queries.nbytes, 4 * times.heads * times.size * seen)


def _rowwise(times: Times, count: int) -> None:
    """Norm with residual, rotation and gate; a model's rows come from the L2 cache, and so do these."""
    hidden, inner = times.shapes["down"][1], times.shapes["down"][0]
    x, added, weight = times.random(count, hidden), times.random(count, hidden), times.random(hidden)
    both = times.random(count, 2 * inner)
    projected = times.random(count, times.shapes["qkv"][1])
    cosines, sines = torch.rand(2, count, times.size // 2, device=times.device)
    keys, values = (times.random(2 * count, times.kv_heads, times.size) for _ in range(2))
    places = torch.arange(count, device=times.device)
    for name, function, moved in (
        ("norm with residual", lambda: norm(x, weight, 1e-5, added), 4 * x.nbytes),
        ("rotation", lambda: rotate(projected, cosines, sines, places, keys, values), 2 * projected.nbytes),
        ("gate", lambda: gate(both), both.nbytes * 3 // 2),
    ):
        times.note(f"{name}, {count} rows", seconds_each([function]), moved)


def _linear(times: Times, part: str) -> None:
    inputs, outputs = times.shapes[part]
    weight = random((outputs, inputs), times.dtype, times.device)
    weights = [weight, *(weight.clone() for _ in range(copies(weight.nbytes, tiny=times.tiny) - 1))]
    for count in (1, 17) if times.tiny else _MULTIPLIED:
        x = times.random(count, inputs)
        own, vendor = (seconds_each(calls(function, x, weights)) for function in (linear, F.linear))
        name = f"linear {part} {inputs}→{outputs}, {count} rows"
        times.note(name, own, weight.nbytes, 2 * count * weight.numel())
        times.book.note(
            f"{name}, vendor", vendor, f"    the vendor's: {1e6 * vendor:.1f} us; {own / vendor:.2f} times it"
        )
