"""Ten thousand prompts with the embedded model: memory over time, graphs, and how long the device waits for the host.

The model is so small that the host decides the speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import detgen
from detgen import Engine, Request, SamplingParams
from gpu.notebook import Asked, Notebook

_PROMPTS, _BATCH, _TOLD = 10_000, 64, 1000
_SECONDS = 30.0  # no prompts are started later
_MIXED = ({}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"temperature": 0.7, "logprobs": 2})


class Timed:
    """Passes that are timed on the device, by events around their launches.

    Args:
        run: launches a pass.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, *arguments: Any) -> Any:
        """Launch a pass."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        found = self._run(*arguments)
        last.record()
        self._events.append((first, last))
        return found

    def seconds(self) -> float:
        """Return the seconds of all passes so far."""
        torch.cuda.synchronize()
        return sum(first.elapsed_time(last) for first, last in self._events) / 1e3


def requests(count: int) -> list[Request]:
    """Return requests for 1 to 24 tokens after 1 to 200 characters of demo prompts, with all ways of choosing."""
    path = Path(detgen.__file__).parent / "demo_models" / "prompts.jsonl"
    texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Request(
            prompt=texts[i % len(texts)][: 1 + i * 37 % 200],
            params=SamplingParams(max_tokens=1 + i * 7 % 24, seed=i, **_MIXED[i % len(_MIXED)]),
        )
        for i in range(count)
    ]


def measure(book: Notebook, asked: Asked) -> None:
    """Run all requests, or those that start in time."""
    engine = Engine(device=asked.device, drafter="none", batch_size=_BATCH, kv_memory=1 << 30)
    on_device = asked.device == "cuda"
    decoder: Any = engine.canonical.decoder
    timed = Timed(decoder._run) if on_device else None
    if timed is not None:
        decoder._run = timed
    started = time.perf_counter()
    until, done, tokens, memory = started + _SECONDS, 0, 0, list[int]()
    count = 40 if asked.tiny else _PROMPTS
    told = 20 if asked.tiny else _TOLD
    for completions in engine.stream(r for r in requests(count) if time.perf_counter() < until):
        for completion in completions:
            done, tokens = done + 1, tokens + len(completion.token_ids)
            if done % told == 0:
                memory.append(torch.cuda.memory_reserved() if on_device else 0)
                shapes = len(decoder._shapes) if on_device else 0
                book.note(f"after {done} prompts", {"memory": memory[-1], "shapes": shapes})
    seconds, passes = time.perf_counter() - started, engine.stats.target_passes
    found = {"prompts": done, "tokens": tokens, "seconds": seconds, "passes": passes, "memory": memory}
    line = f"{done:,} of {count:,} prompts, {tokens / seconds:,.0f} tokens/s, {1e3 * seconds / passes:.2f} ms a pass"
    if timed is not None:
        found["device"] = timed.seconds()
        line += f", {1e3 * found['device'] / passes:.2f} of them on the device for its layers"
        line += f"; MiB reserved: {', '.join(str(bytes >> 20) for bytes in memory)}"
    book.note("run", found, line)
    assert not memory or memory[-1] <= 1.1 * memory[0] + (64 << 20), "memory grows with the number of prompts"
