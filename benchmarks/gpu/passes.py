"""Passes of a whole model with random weights, by detgen's own `ModelRunner`: row counts, replayed and launched anew.

Decode rows come after contexts of random keys and values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.bench.model_source import TokenIds
from detgen.bench.random_weights import random_model
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.triton.sampling_kernels import choose_by, unpack
from detgen.models.attaching import attach
from detgen.models.loaded import LoadedModel
from detgen.models.loading import pick_device
from detgen.program.arrays import FLOAT32, array, same_bits, tensor
from detgen.runner import preparing
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner
from gpu.ceilings import roof
from gpu.notebook import Asked, Notebook
from gpu.timing import host_seconds

CONTEXT = 1024
_DECODED = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows
_READ = (512, 2048)
_ROUNDS = 5
_CHAINED = 4  # passes of a chain
_SPARE = 4 << 30  # bytes of the device's memory to leave to passes


class Built(NamedTuple):
    """A model that is ready for passes.

    Attributes:
        forward: runs its passes.
        layers: number of layers.
        weights: parameters that a pass reads.
        head: parameters of the output layer among them, which only wanted rows are multiplied by.
        width: query heads times their size, all layers together, for the arithmetic of attention.
        context: positions before decode rows.
        slots: number of requests whose contexts fit the cache.
    """

    forward: ModelRunner
    layers: int
    weights: int
    head: int
    width: int
    context: int
    slots: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that a pass reads."""
        return self.weights * int(self.forward.cache.values[0].itemsize)


def build(asked: Asked, slots: int) -> Built:
    """Build a model of random weights whose cache has the contexts of `slots` requests, or of those that fit."""
    device = pick_device(asked.device)
    dtype, name = torch.float32 if asked.tiny else torch.bfloat16, asked.model
    model = random_model(name, "target", dtype, asked.device, 0).cpu()  # drawing billions on a processor takes minutes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    config = model.config
    weights, head = sum(p.numel() for p in model.parameters()), model.get_output_embeddings().weight.numel()
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    context = 100 if asked.tiny else CONTEXT
    layout = attach(model, name)
    of_slot, least = (-(-positions // PAGE) for positions in (context + _CHAINED, _READ[-1]))
    pages = slots * of_slot
    if device.type == "cuda":
        position = KVCache.position_bytes(layout.cached, FLOAT32)
        pages = min(pages, (torch.cuda.mem_get_info(asked.device)[0] - _SPARE) // (position * PAGE))
    pages = max(pages, least)
    loaded = LoadedModel(name, model, TokenIds(), "", 1 << 16, frozenset())
    forward = preparing._on_cuda(loaded, model, layout, BlockManager(pages), device, FLOAT32)
    for buffer in (*forward.cache.keys, *forward.cache.values):
        tensor(buffer).normal_()
    width = sum(layout.group * kv_heads * size for kv_heads, _, size in layout.cached)
    return Built(forward, len(layout.cached), weights, head, width, context, pages // of_slot)


def decode(built: Built, rows: int) -> Windows:
    """Return a pass with one row per request, each after its context."""
    assert rows <= built.slots, f"the device's memory holds the contexts of {built.slots} requests"
    built.forward.cache.pages.lay_out(rows, built.context + 1)
    return Windows.of([Window(slot, built.context, [7], 1) for slot in range(rows)])


def read(built: Built, rows: int) -> Windows:
    """Return a pass with the first rows of a prompt."""
    built.forward.cache.pages.lay_out(1, rows)
    return Windows.of([Window(0, 0, [7] * rows, 1)])


def measure(book: Notebook, asked: Asked) -> None:
    """Run decode passes, checking that their first rows have the same bits, then passes that read a prompt."""
    decoded, prompts = ((1, 2, 3), (8,)) if asked.tiny else (_DECODED, _READ)
    bandwidth, rate = roof(asked, "float32" if asked.tiny else "bfloat16")
    built = build(asked, decoded[-1])
    book.note("model", {"weights": built.weights, "decoder": built.forward.decoder.kind, "slots": built.slots})
    book.say(f"{asked.model}: {built.weights / 1e9:.2f} billion weights, {built.forward.decoder.kind}")
    logits: dict[int, np.ndarray] = {}
    for rows in decoded:
        name = f"batch {rows}, context {built.context:,}"
        with book.part(name):
            windows = decode(built, rows)
            with _anew(built.forward):
                logits[rows] = array(built.forward.run(windows)[0]).copy()
            _note(book, built, name, windows, bandwidth, rate)
    first = next(iter(logits.values()), None)
    other = [rows for rows, mine in logits.items() if first is not None and not same_bits(mine, first)]
    book.note("other bits", other, f"row counts with other bits than one row's: {other or 'none'}")
    for rows in decoded[-2:]:
        with book.part(f"chain of {rows} rows"):
            equal = _chained(built, rows)
            said = "equal bits" if equal else "OTHER BITS"
            book.note(f"chain of {rows} rows", {"equal": equal}, f"chain of {_CHAINED} passes of {rows} rows: {said}")
            assert equal, said
    for rows in prompts:
        name = f"prompt of {rows:,} rows"
        with book.part(name):
            _note(book, built, name, read(built, rows), bandwidth, rate)


def _note(book: Notebook, built: Built, name: str, windows: Windows, bandwidth: float, rate: float) -> None:
    """Time a pass replayed and launched anew, and compute the least that its bytes and arithmetic can take.

    A pass that is never recorded is launched anew both times.
    """
    run = partial(built.forward.run, windows)
    rounds = _ROUNDS if built.forward.device.type == "cuda" else 1
    with _anew(built.forward):
        launched, want = host_seconds(run, rounds), run()
    seconds, got = host_seconds(run, rounds), run()
    equal = same_bits(got, want)
    seen = int((windows.positions + 1).sum())
    held = int((windows.starts + windows.lengths).sum()) * built.forward.cache.entry_bytes
    moved = built.weight_bytes + held
    multiplied = (built.weights - built.head) * len(windows.tokens) + built.head * int(windows.logits.sum())
    operations = 2 * multiplied + 4 * built.width * seen
    floor = max(moved / bandwidth, operations / rate)
    found: dict[str, Any] = {"replayed": seconds, "eager": launched, "equal": equal, "floor": floor}
    times = f"{1e3 * seconds:.2f} ms, {seconds / floor:.2f} times its floor of {1e3 * floor:.2f}"
    line = f"{name}: {times}; {1e3 * launched:.2f} ms launched anew, {'equal bits' if equal else 'OTHER BITS'}"
    book.note(name, found | {"bytes": moved, "operations": operations}, line)


def _chained(built: Built, rows: int) -> bool:
    """Return whether passes in one call give what they give one by one: tokens, leads, log-probabilities."""
    forward, windows = built.forward, decode(built, rows)
    forward.cache.pages.lay_out(rows, built.context + _CHAINED)
    _, scores, _ = forward.chain(windows, np.full(rows, _CHAINED))
    found = [np.asarray(x).reshape(rows, _CHAINED) for x in scores[:-1]]  # no likely tokens are asked for
    for step in range(_CHAINED):
        wanted = unpack(choose_by(tensor(forward.run(windows)), None).cpu())
        if any(a[:, step].tobytes() != np.asarray(b).tobytes() for a, b in zip(found, wanted[:-1], strict=True)):
            return False
        tokens = wanted.tokens.tolist()
        windows = Windows.of([Window(i, built.context + step + 1, [token], 1) for i, token in enumerate(tokens)])
    return True


def _anew(forward: ModelRunner) -> AbstractContextManager[None]:
    """Inside the block, passes are neither recorded nor replayed."""
    return forward.decoder.telling(lambda name, output: None)
