"""The shape classes of a model on this machine: a letter for each row count and operation.

The operations are the loaded model's own: each distinct linear shape, as a pass with hooks meets it, the attention of
one window, and whole passes. Two row counts are in one class if the rows that both have come out with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.probe import same_bits
from detgen.passes.forward import Forward
from detgen.passes.hooks import hooked
from detgen.passes.native_decoder import NativeDecoder
from detgen.passes.packing import Shapes, Window, Windows, pack
from detgen.progress import Observer

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_TIMED = 5  # timed passes per row count; the quickest counts

Compute = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProbeView:
    """The classes, and the time of passes.

    Attributes:
        columns: names of the operations; the last one is the whole pass.
        rows: row counts.
        threads: thread counts, one or two.
        letters: the class of (row count, thread count, column).
        milliseconds: of a pass, by (row count, thread count).
        canonical: row counts that the engine's canonical passes may have.
        report: what the engine's own probe found.
    """

    columns: list[str]
    rows: tuple[int, ...]
    threads: tuple[int, ...]
    letters: dict[tuple[int, int, str], str]
    milliseconds: dict[tuple[int, int], float]
    canonical: frozenset[int]
    report: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        classes = [
            {"rows": n, "threads": t, "milliseconds": ms, **{c: self.letters[n, t, c] for c in self.columns}}
            for (n, t), ms in sorted(self.milliseconds.items())
        ]
        return {**self.report, "columns": self.columns, "classes": classes, "canonical": sorted(self.canonical)}


def view(config: EngineConfig, observer: Observer) -> ProbeView:
    """Run every operation at every row count, with one and with all threads.

    Args:
        config: how to build the engine.
        observer: is told what is being done.

    Raises:
        EngineError: the engine cannot be built.
    """
    engine = Engine(replace(config, drafter="none", draft=None), observer=observer)
    observer.stage("comparing and timing row counts")
    forward, shapes = _passes(engine)
    before = torch.get_num_threads()
    threads = tuple(sorted({1, before})) if forward.device.type == "cpu" else (before,)
    rows = tuple(n for n in _ROWS if n <= max(shapes.most_rows, 16))
    forward.cache.pages.lay_out(1, shapes.fit_keys(rows[-1]))  # each pass is one window
    free = replace(shapes, rows=(1, rows[-1]), dense=True)
    if isinstance(forward.model, NativeDecoder):
        operations = _steps(forward, forward.model, free)
    else:
        operations = {**_linears(forward.model, engine, rows[-1]), "attention": _attention(engine, free)}
    tokens = torch.randint(engine.vocabulary, (rows[-1],), generator=torch.Generator().manual_seed(1)).tolist()
    operations["pass"] = lambda n: forward.run([Window(0, 0, tokens[:n], n)], replace(shapes, rows=(n,), dense=False))
    letters: dict[tuple[int, int, str], str] = {}
    milliseconds = {}
    try:
        for name, compute in operations.items():
            for key, letter in _classes(compute, rows, threads).items():
                letters[(*key, name)] = letter
        for count in threads:
            torch.set_num_threads(count)
            for n in rows:
                milliseconds[n, count] = min(_milliseconds(operations["pass"], n) for _ in range(_TIMED))
    finally:
        torch.set_num_threads(before)
    allowed = frozenset(n for n in rows if n <= shapes.most_rows and shapes.fit_rows(n) == n)
    return ProbeView(list(operations), rows, threads, letters, milliseconds, allowed, engine.probe_report())


def _passes(engine: Engine) -> tuple[Forward, Shapes]:
    """The target's passes, of a model that thinks those of its backbone, to which no states are added."""
    forward, shapes = engine.canonical
    plain = forward.counting()
    plain.thinking = None
    return plain, shapes


def _milliseconds(compute: Compute, rows: int) -> float:
    started = time.perf_counter()
    compute(rows)
    return 1000 * (time.perf_counter() - started)


def _classes(compute: Compute, rows: tuple[int, ...], threads: tuple[int, ...]) -> dict[tuple[int, int], str]:
    """A letter for each row and thread count; the largest row count with all threads is of class A."""
    known: list[torch.Tensor] = []
    letters = {}
    for count in reversed(threads):
        torch.set_num_threads(count)
        for n in reversed(rows):
            with torch.inference_mode():
                out = compute(n)
            mine = next((i for i, other in enumerate(known) if _agree(out, other)), None)
            if mine is None:
                mine = len(known)
                known.append(out.clone())
            letters[n, count] = chr(ord("A") + mine) if mine < 26 else "?"
    return letters


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    shared = min(len(a), len(b))
    return same_bits(a[:shared], b[:shared])


def _steps(forward: Forward, model: NativeDecoder, free: Shapes) -> dict[str, Compute]:
    """The distinct steps of a native decoder, of one window."""

    def compute(step: int, rows: int) -> torch.Tensor:
        windows = Windows.of([Window(0, 0, [0] * rows, rows)])
        return model.alone(step, pack(windows, free, forward.cache.pages.tables, 0, 1, forward.device))

    return {name: partial(compute, step) for name, step in model.operations().items()}


def _linears(model: nn.Module, engine: Engine, rows: int) -> dict[str, Compute]:
    """The distinct linear shapes of the model, as the innermost modules of one pass meet them."""
    forward, shapes = _passes(engine)
    found: dict[str, Compute] = {}

    def take(_: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        x = args[0] if args and not list(module.children()) else None
        if not isinstance(x, torch.Tensor) or not isinstance(output, torch.Tensor) or not x.is_floating_point():
            return
        if "Linear" not in type(module).__name__ and "Conv1D" not in type(module).__name__:
            return
        name = f"{x.shape[-1]}→{output.shape[-1]}"
        if name not in found:
            x = torch.randn(*x.shape[:-2], rows, x.shape[-1], generator=torch.Generator().manual_seed(2)).to(x)
            found[name] = lambda n: module(x[..., :n, :].clone()).view(n, -1)

    with hooked(model, take):
        forward.run([Window(0, 0, [0] * min(rows, shapes.most_rows), 1)], shapes)
    return dict(sorted(found.items()))


def _attention(engine: Engine, free: Shapes) -> Compute:
    """Attention of one window of n tokens, whose rows are the same in each call."""
    forward, _ = _passes(engine)
    cache = forward.cache
    g = torch.Generator().manual_seed(3)
    sizes = (cache.keys[0].shape[2], cache.values[0].shape[2])
    heads = cache.values[0].shape[1]
    dtype, device = cache.keys[0].dtype, forward.device
    k, v = (torch.randn(free.most_rows, heads, size, generator=g).to(device, dtype) for size in sizes)
    q = torch.randn(k.shape, generator=g).to(k)

    def compute(n: int) -> torch.Tensor:
        windows = Windows.of([Window(0, 0, [0] * n, 0)])
        packed = pack(windows, free, cache.pages.tables, cache.scratch, 1, device)
        return forward.attend(packed, 0, q[:n], k[:n], v[:n], AttentionTraits(sizes[0] ** -0.5)).flatten(1)

    return compute
