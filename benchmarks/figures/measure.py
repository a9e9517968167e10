"""The measurements behind figures 4, 9 and 13. They run in detgen's process, on the engine that it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from detgen.bench.peer_interface import Job, Prompt
from detgen.bench.peers.detgen_engine import DetgenPeer, generate

if TYPE_CHECKING:
    import torch

    from detgen.machine import Device

Data = dict[str, Any]

_CONTEXT = 64  # cached tokens before the rows of timed passes


def linear_layers(peer: DetgenPeer, repeats: int, most_rows: int = 2048) -> Data:
    """Figure 4: one linear layer of the target's feed-forward size, row-invariant and plain.

    The row-invariant one takes no more rows than a canonical pass has, so many rows take several calls.

    Returns:
        `rows`, and the median milliseconds of `invariant` and `plain` for each; `shape` of the weight [out, in].
    """
    import torch
    import torch.nn.functional as F

    from detgen.kernels.input_batch import MOST_ROWS

    target: Any = peer.engine.config.target
    config = target.model.config.get_text_config()
    forward = peer.engine.canonical
    device = forward.device
    generator = torch.Generator().manual_seed(peer.source.seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).to(str(device))

    weight = matrix(config.intermediate_size, config.hidden_size)
    packed = _row_invariant(weight)

    def invariant(parts: list[torch.Tensor]) -> None:
        for part in parts:
            packed(part)

    rows = [1 << i for i in range(most_rows.bit_length())]
    found: Data = {"rows": rows, "invariant": [], "plain": [], "shape": list(weight.shape)}
    for count in rows:
        x = matrix(count, config.hidden_size)
        ms = _interleaved([partial(invariant, list(x.split(MOST_ROWS))), partial(F.linear, x, weight)], repeats, device)
        found["invariant"].append(ms[0])
        found["plain"].append(ms[1])
    return found | {"dtype": peer.source.engine.dtype}


def _row_invariant(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Multiplies rows, float32 [rows, inputs], by a weight [outputs, inputs], where the weight is."""
    if weight.device.type == "cpu":
        from detgen.kernels.c.modules import NativeLinear

        return NativeLinear(weight)
    from detgen.kernels.c.panels import joined
    from detgen.kernels.triton.linear import linear
    from detgen.program.arrays import each, tensor

    joint = joined([weight.cpu()], [])
    moved = each(joint, lambda x: tensor(x).to(weight.device))
    return lambda x: linear(x, moved, x.new_empty(len(x), len(weight)))


def _interleaved(functions: list[Callable[[], object]], repeats: int, device: Device) -> list[float]:
    """Median milliseconds of each function, called in turn; two calls of each warm up."""
    import torch

    times: list[list[float]] = [[] for _ in functions]
    with torch.inference_mode():
        for _ in range(repeats + 2):
            for function, taken in zip(functions, times, strict=True):
                started = time.perf_counter()
                function()
                if device.type == "cuda":
                    torch.cuda.synchronize(str(device))
                taken.append((time.perf_counter() - started) * 1e3)
    return [median(taken[2:]) for taken in times]


def pass_costs(peer: DetgenPeer, repeats: int) -> Data:
    """Figure 9, left: latency of a canonical pass over its rows, all of them windows of one sequence.

    Returns:
        `rows`, and the median milliseconds of a pass for each.
    """
    import torch

    from detgen.kernels.input_batch import MOST_ROWS, Window

    forward, most = peer.engine.canonical, MOST_ROWS
    forward.cache.pages.lay_out(1, _CONTEXT + most)
    rows = [1 << i for i in range(most.bit_length())]
    generator = torch.Generator().manual_seed(peer.source.seed)
    tokens: list[int] = torch.randint(0, peer.engine.vocabulary, (_CONTEXT + most,), generator=generator).tolist()
    for at in range(0, _CONTEXT, most):
        forward.run([Window(0, at, tokens[at : min(at + most, _CONTEXT)], 0)])
    windows = [Window(0, _CONTEXT, tokens[_CONTEXT : _CONTEXT + count], count) for count in rows]
    runs = [partial(forward.run, [window]) for window in windows]
    return {"rows": rows, "ms": _interleaved(list(runs), repeats, forward.device)}


def windows(
    peer: DetgenPeer, prompts: tuple[Prompt, ...], window_lengths: list[int], batch_sizes: list[int], repeats: int
) -> Data:
    """Figures 9, right, and 13: so many tokens looked up and verified, for so many requests at a time.

    Returns:
        `windows`, `requests`, and for each window a list over requests of `recomputed` (share of all tokens
        computed that were thrown away) and `speed` (output tokens per second, median).
    """
    found: Data = {"windows": window_lengths, "requests": batch_sizes, "recomputed": [], "speed": []}
    for length in window_lengths:
        recomputed, speeds = [], []
        for size in batch_sizes:
            engine = peer.engine.with_settings(drafter="ngram", draft_tokens=length, batch_size=size)
            some = prompts[: max(size, 4)]
            output = sum(p.output for p in some)
            job = Job(some, size, (True,) * len(some))
            outcomes = [generate(engine, job) for _ in range(repeats + 1)][1:]
            counts = outcomes[-1].counts
            wasted = counts["drafted"] - counts["accepted"]
            recomputed.append(wasted / (wasted + output))
            speeds.append(output / median(o.seconds for o in outcomes))
        found["recomputed"].append(recomputed)
        found["speed"].append(speeds)
    return found
