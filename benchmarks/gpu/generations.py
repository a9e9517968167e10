"""Whole generations with random weights, all requests at once: detgen's `none` and `auto`, and transformers' continuous
batching. Lengths are equal, or mixed with the same mean.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from detgen.bench.config import BenchConfig
from detgen.bench.model_source import resolve
from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome, Peer, Prompt
from detgen.bench.peers import peer_class
from detgen.engine.config import EngineConfig
from detgen.progress import Unobserved
from gpu.notebook import Asked, Notebook

# Factors of prompts and outputs, each for the same number of requests; their mean is 1.
_FACTORS = ((0.25, 1.25), (0.5, 0.25), (1.25, 2.0), (2.0, 0.5))
_ROUNDS = 2
_SIZES = (128, 64, 512, 128)  # requests, requests at a time, and mean tokens in and out


def workloads(requests: int, prompt: int, output: int, vocabulary: int) -> dict[str, tuple[Prompt, ...]]:
    """Return prompts of random ids: all of the same lengths, and mixed ones with as many tokens altogether."""
    draw = random.Random(0)

    def made(factors: tuple[tuple[float, float], ...]) -> tuple[Prompt, ...]:
        sizes = [(round(prompt * a), round(output * b)) for a, b in factors]
        chosen = [sizes[i % len(sizes)] for i in range(requests)]
        return tuple(Prompt(tuple(draw.choices(range(vocabulary), k=size)), count) for size, count in chosen)

    return {"equal": made(((1.0, 1.0),)), "mixed": made(_FACTORS)}


def measure(book: Notebook, asked: Asked) -> None:
    """Run some rounds of both workloads with detgen's drafters or with the peer."""
    requests, batch, prompt, output = (4, 2, 8, 4) if asked.tiny else _SIZES
    dtype: Literal["float32", "bfloat16"] = "float32" if asked.tiny else "bfloat16"
    config = BenchConfig(EngineConfig(device=asked.device, dtype=dtype), random_weights=asked.model)
    target = resolve(config, Unobserved())
    made = workloads(requests, prompt, output, target.vocabulary)
    longest = max(len(p.tokens) + p.output for prompts in made.values() for p in prompts) + 1
    name = "transformers-continuous" if asked.stage.endswith("peer") else "detgen"
    with tempfile.TemporaryDirectory() as scratch:
        source = ModelSource(target.engine, config.random_weights, 0, longest, Path(scratch), native=target.native)
        kind = peer_class(name)
        contenders = {c.name: c for c in kind.contenders(source)}
        chosen = [contenders[n] for n in (("none", "auto") if name == "detgen" else ("generate_batch",))]
        peer: Any = kind(source, chosen[0], (batch,))
        book.say(f"{requests} requests, at most {batch} at a time, {prompt} tokens in and {output} out on average")
        _run(book, peer, chosen, made, batch)


def _run(
    book: Notebook, peer: Peer, contenders: list[Contender], made: dict[str, tuple[Prompt, ...]], batch: int
) -> None:
    """Run a short job to warm up, then the rounds; the plainest contender first, in case the stage is cut off."""
    seconds: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        for contender in contenders:
            for workload, prompts in made.items():
                name = f"{contender.peer} {contender.name}, {workload}"
                with book.part(name):
                    if name not in seconds:
                        short = tuple(replace(p, output=3) for p in prompts[:batch])
                        warming = peer.run(contender, Job(short, batch, (True,) * len(short))).seconds
                        book.note(f"{name}, warming up by {len(short)} prompts and 3 tokens of each", warming)
                    outcome = peer.run(contender, Job(prompts, batch, (True,) * len(prompts)))
                    seconds.setdefault(name, []).append(outcome.seconds)
                    _note(book, name, prompts, outcome, seconds[name])


def _note(book: Notebook, name: str, prompts: tuple[Prompt, ...], outcome: Outcome, seconds: list[float]) -> None:
    tokens = sum(p.output for p in prompts)
    speed = tokens / min(seconds)
    first = [at for at in outcome.first if at is not None]
    found = {
        "tokens_per_second": speed,
        "seconds": seconds,
        "passes": outcome.passes,
        "first": sum(first) / len(first) if first else None,
        "counts": outcome.counts,
    }
    book.note(name, found, f"{name}: {speed:,.0f} tokens/s, {seconds[-1]:.2f} s, {outcome.passes or 'unknown'} passes")
