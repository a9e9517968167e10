"""The measurements behind figures 4, 6, 9 and 13. Runs in a child process, whose engine the figures share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from detgen.bench.interface import Job, ModelSource, Prompt
from detgen.bench.models import loaded
from detgen.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from detgen.engine import Engine

Data = dict[str, Any]

_MOST_REQUESTS = 16  # requests at a time in any figure
_CONTEXT = 64  # cached tokens behind which timed passes stand


@cache
def _target(source: ModelSource) -> tuple[Engine, Any]:
    """An engine without a draft, and the configuration of its model."""
    from detgen.engine import Engine

    target = loaded(source, "target")
    engine = Engine(
        target=target,
        drafter="none",
        batch_size=_MOST_REQUESTS,
        device=source.device,
        threads=source.threads,
        prefix_reuse=False,
    )
    return engine, target.model.config.get_text_config()


def linear_layers(source: ModelSource, repeats: int, most_rows: int = 2048) -> Data:
    """Figure 4: one linear layer of the target's feed-forward size, row-invariant and plain.

    The row-invariant one keeps to the row counts of canonical passes, so many rows take several calls.

    Returns:
        `rows`, and the median milliseconds of `invariant` and `plain` for each; `shape` of the weight [out, in].
    """
    import torch
    import torch.nn.functional as F

    from detgen.kernels.linear import PrepackedLinear, can_prepack

    engine, config = _target(source)
    forward, shapes = engine.canonical
    dtype, device = forward.cache.keys[0].dtype, forward.device
    generator = torch.Generator().manual_seed(source.seed)
    weight = torch.randn(config.intermediate_size, config.hidden_size, generator=generator).to(device, dtype)
    packed = PrepackedLinear(weight, None) if can_prepack(weight) else None
    rows = [1 << i for i in range(most_rows.bit_length())]
    found: Data = {"rows": rows, "invariant": [], "plain": [], "shape": list(weight.shape), "dtype": source.dtype}
    for count in rows:
        x = torch.randn(count, config.hidden_size, generator=generator).to(device, dtype)
        parts = [_padded(part, shapes.fit_rows(len(part))) for part in x.split(shapes.most_rows)]

        def invariant(parts: list[torch.Tensor] = parts) -> None:
            for part in parts:
                packed(part) if packed is not None else F.linear(part, weight)

        def plain(x: torch.Tensor = x) -> None:
            F.linear(x, weight)

        ms = _interleaved([invariant, plain], repeats, device)
        found["invariant"].append(ms[0])
        found["plain"].append(ms[1])
    return found


def _padded(x: Any, rows: int) -> Any:
    """x with rows of zeros behind it."""
    import torch

    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])])


def _interleaved(functions: list[Callable[[], None]], repeats: int, device: Any) -> list[float]:
    """Median milliseconds of each function, called in turn."""
    import torch

    times: list[list[float]] = [[] for _ in functions]
    with torch.inference_mode():
        for i in range(repeats + 2):
            for function, taken in zip(functions, times, strict=True):
                started = time.perf_counter()
                function()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if i >= 2:
                    taken.append((time.perf_counter() - started) * 1e3)
    return [median(taken) for taken in times]


def consistent_spans(source: ModelSource, prompts: tuple[Prompt, ...], batch_size: int) -> Data:
    """Figure 6: how many tokens of an unverified output agree with the canonical one.

    Returns:
        `first`: tokens before the first difference, all of them where there is none; `second`: tokens that agree,
        position by position, between the first and the second difference; `output`: tokens of each prompt.
    """
    engine = _target(source)[0].with_settings(batch_size=batch_size)
    canonical, _ = _generate(engine, Job(prompts, batch_size, (True,) * len(prompts)))
    fast, _ = _generate(engine, Job(prompts, batch_size, (False,) * len(prompts)))
    spans = [_spans(a, b) for a, b in zip(fast, canonical, strict=True)]
    return {
        "first": [first for first, _ in spans],
        "second": [second for _, second in spans if second is not None],
        "output": [p.output for p in prompts],
        "batch_size": batch_size,
    }


def _spans(tokens: list[int], canonical: list[int]) -> tuple[int, int | None]:
    """Tokens before the first difference, and between it and the second one; None where nothing differs."""
    differ = [i for i, (a, b) in enumerate(zip(tokens, canonical, strict=True)) if a != b]
    if not differ:
        return len(tokens), None
    end = differ[1] if len(differ) > 1 else len(tokens)
    return differ[0], end - differ[0] - 1


def pass_costs(source: ModelSource, repeats: int) -> Data:
    """Figure 9, left: latency of a canonical pass over its rows, all of them windows of one sequence.

    Returns:
        `rows`, and the median milliseconds of a pass for each.
    """
    import torch

    from detgen.passes.packing import Window

    engine, config = _target(source)
    forward, shapes = engine.canonical
    most = shapes.most_rows
    forward.cache.partition(shapes.fit_keys(_CONTEXT + most), 1)
    rows = sorted({shapes.fit_rows(1 << i) for i in range(most.bit_length()) if 1 << i <= most} | {most})
    generator = torch.Generator().manual_seed(source.seed)
    tokens: list[int] = torch.randint(0, config.vocab_size, (_CONTEXT + most,), generator=generator).tolist()
    for at in range(0, _CONTEXT, most):
        forward.run([Window(0, at, tokens[at : min(at + most, _CONTEXT)], 0)], shapes)

    def run(count: int) -> Callable[[], None]:
        window = Window(0, _CONTEXT, tokens[_CONTEXT : _CONTEXT + count], count)

        def once() -> None:
            forward.run([window], shapes)

        return once

    return {"rows": rows, "ms": _interleaved([run(n) for n in rows], repeats, forward.device)}


def windows(
    source: ModelSource, prompts: tuple[Prompt, ...], window_lengths: list[int], batch_sizes: list[int], repeats: int
) -> Data:
    """Figures 9, right, and 13: the fast path verified every so many tokens, for so many requests at a time.

    Returns:
        `windows`, `requests`, and for each window a list over requests of `recomputed` (share of all tokens
        computed that were thrown away) and `speed` (output tokens a second, median).
    """
    base, _ = _target(source)
    found: Data = {"windows": window_lengths, "requests": batch_sizes, "recomputed": [], "speed": []}
    for length in window_lengths:
        recomputed, speeds = [], []
        for size in batch_sizes:
            engine = base.with_settings(drafter="self", verify_window=length, batch_size=size)
            some = prompts[: max(size, 4)]
            job = Job(some, size, (True,) * len(some))
            seconds = [_generate(engine, job)[1] for _ in range(repeats + 1)][1:]
            total = engine.stats.drafters.total()
            wasted = total.drafted - total.accepted
            recomputed.append(wasted / (wasted + engine.stats.tokens))
            speeds.append(sum(p.output for p in some) / median(seconds))
        found["recomputed"].append(recomputed)
        found["speed"].append(speeds)
    return found


def _generate(engine: Engine, job: Job) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, and the seconds it took."""
    requests = [
        Request(i, i, token_ids=p.tokens, params=SamplingParams(max_tokens=p.output, deterministic=verified))
        for i, (p, verified) in enumerate(zip(job.prompts, job.deterministic, strict=True))
    ]
    tokens: list[list[int]] = [[] for _ in requests]
    started = time.perf_counter()
    for completions in engine.stream(requests):
        for completion in completions:
            if completion.error is not None:
                raise RuntimeError(completion.error)
            tokens[completion.request.index] = list(completion.token_ids)
    return tokens, time.perf_counter() - started
