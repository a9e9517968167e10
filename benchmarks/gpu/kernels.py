"""Detgen's kernels for CUDA: right, and a row's bits alone, beside others, at other places, on other pages.

A kernel is right where it is no further from the exact result than twice what its plain reference and rounding are.
That tensor cores make the same of a row in tiles of 16 and of 64 rows, the linear kernel does not promise: it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.bits import same_bits
from detgen.kernels.triton.gate import gate, gate_reference
from detgen.kernels.triton.linear import linear
from detgen.kernels.triton.norm import norm, norm_reference
from detgen.kernels.triton.rotate import rotate, rotate_reference
from gpu.notebook import Asked, Notebook
from gpu.paged import Cache, Packed, attend_exactly, attend_rows
from gpu.products import ROWS, classes, in_words, product_of, random

_ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}
_ALONE = 24  # rows that are computed alone
_BESIDE = (2, 3, 5, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128)


class Kernel(NamedTuple):
    """A kernel at some shape.

    Attributes:
        name: in words.
        rows: that it is given.
        compute: the results of rows in any order, [rows, ...]; the second argument is a number of a layout of pages.
        exact: the same in a wider type.
        plain: the same by its reference.
        paged: whether layouts differ.
    """

    name: str
    rows: int
    compute: Callable[[Sequence[int], int], torch.Tensor]
    exact: torch.Tensor
    plain: torch.Tensor
    paged: bool = False


def measure(book: Notebook, asked: Asked) -> None:
    """Check each kernel; then the linear one at many row counts, where its tiles have other heights."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for dtype in (torch.float32,) if asked.tiny else (torch.bfloat16, torch.float16, torch.float32):
        for name, make in _makers(asked, dtype):
            with book.part(f"{name}, {dtype}"):
                _check(book, make(), dtype)
        with book.part(f"linear, heights of tiles, {dtype}"):
            _heights(book, asked, dtype)


def _check(book: Notebook, kernel: Kernel, dtype: torch.dtype) -> None:
    everything = range(kernel.rows)
    whole = kernel.compute(everything, 0)
    error, plain = (_distance(x, kernel.exact) for x in (whole, kernel.plain))
    wrong = [] if error <= 2 * plain + 2 * _ROUNDED[dtype] else ["it is wrong"]
    some = torch.linspace(0, kernel.rows - 1, min(_ALONE, -(-kernel.rows // 2))).long().tolist()
    ways: dict[str, list[tuple[Sequence[int], int]]] = {
        "alone": [([row], 0) for row in some],
        "beside fewer": [(range(n), 0) for n in _BESIDE if n < kernel.rows],
        "at other places": [([*everything[1:], 0], 0), (torch.randperm(kernel.rows).tolist(), 0)],
    }
    if kernel.paged:
        ways["on other pages"] = [(everything, layout) for layout in (1, 2)]
    for way, calls in ways.items():
        different = sum(not same_bits(kernel.compute(order, layout), whole[list(order)]) for order, layout in calls)
        if different:
            wrong.append(f"other bits {way} in {different} of {len(calls)} calls")
    name = f"{kernel.name}, {str(dtype).rpartition('.')[2]}"
    said = "; ".join(wrong) or "right, and the same bits " + ", ".join(ways)
    line = f"{name}: {said} (error {error:.1e}, of its reference {plain:.1e})"
    book.note(name, {"error": error, "reference": plain, "rows": kernel.rows, "wrong": wrong}, line)
    assert not wrong, f"{name}: {said}"


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all elements, relative to their size; infinite where something is not finite."""
    distance = float((found.double() - exact.double()).norm() / exact.double().norm())
    return distance if distance == distance else float("inf")


def _makers(asked: Asked, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Kernel]]]:
    """The kernels, by names; each is made when it is checked."""
    how = dtype, asked.device, asked.tiny
    tiny = asked.tiny
    heads = ((4, 2), 16) if tiny else ((32, 8), 128)
    yield "attend", partial(_attend, heads, AttentionTraits(heads[1] ** -0.5), *how)
    for other in [((4, 2), 32)] if tiny else [((16, 8), 256), ((32, 8), 64)]:
        traits = AttentionTraits(other[1] ** -0.5, window=100, softcap=30.0)
        yield f"attend of {other[1]} entries", partial(_attend, other, traits, *how)
    for size in (64,) if tiny else (4096, 2880):
        yield f"norm of {size}", partial(_norm, size, *how)
    for size in (96,) if tiny else (14336, 8191):
        yield f"gate of {size}", partial(_gate, size, *how)
    yield "rotate", partial(_rotate, heads, *how)
    for shape in [(64, 96)] if tiny else [(4096, 6144), (14336, 4096), (2880, 1000)]:
        yield f"linear {shape}", partial(_linear, shape, *how)


def _attend(
    shape: tuple[tuple[int, int], int], traits: AttentionTraits, dtype: torch.dtype, device: str, tiny: bool
) -> Kernel:
    """Windows at the ends of sequences of many lengths, and the beginning of the longest one."""
    (heads, kv_heads), size = shape
    lengths = (1, 66) if tiny else (1, 2, 63, 64, 65, 1000, 1024, 1025, 2049, 5000)
    rows = [(slot, n - i) for slot, n in enumerate(lengths) for i in range(min(n, 5), 0, -1)]
    rows += [(len(lengths) - 1, i) for i in range(4 if tiny else 70)]
    queries = torch.randn(len(rows), heads, size, dtype=dtype, device=device)
    layouts = [Cache.of(lengths, kv_heads, size, dtype, device, seed) for seed in (None, 1, 2)]
    held = []
    for slot, n in enumerate(lengths):
        at = layouts[0].places(slot, n)
        held.append((layouts[0].keys[at], layouts[0].values[at]))
        for layout in layouts[1:]:
            at = layout.places(slot, n)
            layout.keys[at], layout.values[at] = held[-1]

    def compute(order: Sequence[int], layout: int) -> torch.Tensor:
        packed = Packed.of([rows[i] for i in order], heads // kv_heads, device)
        return attend_rows(layouts[layout], queries[list(order)], packed, traits)

    def exactly(kind: torch.dtype) -> torch.Tensor:
        found = []
        for query, (slot, position) in zip(queries, rows, strict=True):
            found.append(attend_exactly(query, *held[slot], position, traits, kind))
        return torch.stack(found)

    name = f"attend {heads}/{kv_heads} x {size}"
    if traits.window is not None:
        name += f", window {traits.window}, capped"
    return Kernel(name, len(rows), compute, exactly(torch.float64), exactly(torch.float32).to(dtype), paged=True)


def _norm(size: int, dtype: torch.dtype, device: str, tiny: bool) -> Kernel:
    hidden, added = torch.randn(2, 5 if tiny else 130, size, dtype=dtype, device=device)
    weight = torch.randn(size, dtype=dtype, device=device)
    exact = norm_reference((hidden + added).float(), weight.float(), 1e-5)

    def compute(order: Sequence[int], _: int) -> torch.Tensor:
        return norm(hidden[list(order)], weight, 1e-5, added[list(order)])

    return Kernel(f"norm of {size}", len(hidden), compute, exact, norm_reference(hidden + added, weight, 1e-5))


def _gate(size: int, dtype: torch.dtype, device: str, tiny: bool) -> Kernel:
    both = 4 * torch.randn(5 if tiny else 130, 2 * size, dtype=dtype, device=device)

    def compute(order: Sequence[int], _: int) -> torch.Tensor:
        return gate(both[list(order)])

    return Kernel(f"gate of {size}", len(both), compute, gate_reference(both.float()), gate_reference(both))


def _rotate(shape: tuple[tuple[int, int], int], dtype: torch.dtype, device: str, tiny: bool) -> Kernel:
    """What it returns and what it writes, side by side."""
    (heads, kv_heads), size = shape
    rows = 5 if tiny else 130
    projected = torch.randn(rows, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    angles = 100 * torch.rand(rows, size // 2, device=device)
    cosines, sines = angles.cos(), angles.sin()
    layouts = [torch.randperm(4 * rows).to(device)[:rows] for _ in range(3)]

    def by(function: Callable[..., torch.Tensor], order: Sequence[int], layout: int, kind: torch.dtype) -> torch.Tensor:
        at, places = list(order), layouts[layout][list(order)]
        keys, values = (torch.zeros(4 * rows, kv_heads, size, dtype=kind, device=device) for _ in range(2))
        queries = function(projected[at].to(kind), cosines[at], sines[at], places, keys, values)
        return torch.cat([queries, keys[places], values[places]], 1)

    exact, plain = (by(rotate_reference, range(rows), 0, kind) for kind in (torch.float32, dtype))
    name = f"rotate {heads}/{kv_heads} x {size}"
    return Kernel(name, rows, lambda order, layout: by(rotate, order, layout, dtype), exact, plain, paged=True)


def _linear(shape: tuple[int, int], dtype: torch.dtype, device: str, tiny: bool) -> Kernel:
    inputs, outputs = shape
    x = torch.randn(20 if tiny else 130, inputs, dtype=dtype, device=device)
    weight, bias = random((outputs, inputs), dtype, device), torch.randn(outputs, dtype=dtype, device=device)
    exact = F.linear(x.double(), weight.double(), bias.double())

    def compute(order: Sequence[int], _: int) -> torch.Tensor:
        return linear(x[list(order)], weight, bias)

    return Kernel(f"linear {inputs}→{outputs}", len(x), compute, exact, F.linear(x, weight, bias))


def _heights(book: Notebook, asked: Asked, dtype: torch.dtype) -> None:
    """Classes of row counts, told apart as those of the vendor's products are: up to 16 rows, tiles are of 16 rows."""
    counts = (1, 16, 17) if asked.tiny else ROWS
    for inputs, outputs in [(64, 96)] if asked.tiny else [(4096, 6144), (14336, 4096)]:
        weight = random((outputs, inputs), dtype, asked.device)
        found = classes(product_of(linear, weight), counts)
        name = f"classes of linear {inputs}→{outputs}, {str(dtype).rpartition('.')[2]}"
        book.note(name, found._asdict(), f"{name}, tiles of 16 rows to 16, of 64 beyond: {in_words(found, counts)}")
