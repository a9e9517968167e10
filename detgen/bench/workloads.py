"""Workloads for the peers: prompts as token ids, each with a number of tokens to generate.

`sample` and `file:PATH` are real prompts, including chats, which the model's template renders; `chats` are those of
`sample`, each as a chat of one message. Synthetic workloads have shapes reported in the field, with random ids: fixed
lengths (input x output), and mixes drawn from log-normal distributions, given here by median and spread (the standard
deviation of the logarithm). They need no data set, and a seed reproduces them.

After any name, `@T` is a temperature, at which only detgen's drafters are measured, since other programs sample other
texts.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from detgen.bench.config import BenchConfig
from detgen.bench.model_source import Target
from detgen.bench.peer_interface import Prompt, Workload
from detgen.errors import DEMO, BenchError

FIXED = {
    "long-prompts": (1024, 16),
    "long-answers": (32, 512),
    "1024x256": (1024, 256),
    "1024x1024": (1024, 1024),
    "4096x1024": (4096, 1024),
}
WHOLE = ("long-prompts", "long-answers")  # as long on a CPU as on a GPU, if the context allows


class Spread(NamedTuple):
    """A log-normal distribution of lengths."""

    median: float
    sigma: float

    def draw(self, random_: random.Random) -> float:
        """Draw a length, at most three standard deviations off the median."""
        return self.median * math.exp(self.sigma * max(min(random_.gauss(0, 1), 3.0), -3.0))


# Means of `sharegpt`: 161 tokens in and 338 out, as the vLLM paper (SOSP 2023) reports. `arxiv`: median and 90th
# percentile of 7059 and 12985 tokens in, 208 and 371 out, as the Sarathi-Serve paper (OSDI 2024) reports.
MIXES = {
    "sharegpt": (Spread(98, 1.0), Spread(282, 0.6)),
    "arxiv": (Spread(7059, 0.476), Spread(208, 0.452)),
}
SYNTHETIC = (*FIXED, *MIXES)
REAL = ("sample", "chats")


def split_name(name: str) -> tuple[str, float]:
    """Return the name without its temperature, and the temperature, 0 if there is none."""
    plain, at, temperature = name.rpartition("@")
    try:
        found = float(temperature) if at else 0.0
    except ValueError:  # the @ belongs to a file's path
        return name, 0.0
    return plain or name, found


def check_name(name: str) -> None:
    """Check that there is a workload of this name.

    Raises:
        BenchError: if there is no such workload or file, or the temperature is out of range.
    """
    name, temperature = split_name(name)
    if not 0 <= temperature <= 1e4:
        raise BenchError(f"workload {name}@{temperature:g}: a temperature is from 0 to 10,000")
    if name.startswith("file:"):
        if not Path(name.removeprefix("file:")).is_file():
            raise BenchError(f"workload {name}: there is no such file")
    elif name not in (*REAL, *SYNTHETIC):
        known = ", ".join((*REAL, "file:PATH", *SYNTHETIC))
        raise BenchError(f"there is no workload {name!r}; choose from {known}, each also with @TEMPERATURE")


def make_workload(name: str, requests: int, scale: float, config: BenchConfig, target: Target) -> Workload:
    """Make a workload by its name.

    Args:
        name: one of REAL or SYNTHETIC, or `file:PATH`; with `@T` at a temperature.
        requests: number of prompts; real ones start over if there are fewer.
        scale: factor of synthetic lengths.
        config: its seed draws synthetic lengths and ids; real prompts are continued by its `max_tokens`.
        target: the target that the prompts are for.

    Raises:
        BenchError: if the name is unknown, or the file has no prompts or one that cannot run.
    """
    vocabulary, called = target.vocabulary, name
    name, temperature = split_name(name)
    if name in SYNTHETIC:
        made, shape = _synthetic(name, requests, scale, random.Random(f"{config.seed} {name}"), vocabulary)
        return Workload(called, made, f"random ids, {shape}, scale {scale:g}, seed {config.seed}", temperature)
    if name in REAL:
        place = str(DEMO / "prompts.jsonl")
        origin = "the embedded prompts" + (", each as a chat" if name == "chats" else "")
    else:
        check_name(name)
        place = origin = name.removeprefix("file:")
    # A random model may have a smaller vocabulary than the tokenizer.
    found = _from_file(place, requests, target, chats=name == "chats")
    ids = [tuple(t % vocabulary for t in tokens) for tokens in found]
    if not ids:
        raise BenchError(f"{origin} has no prompts")
    chosen = [ids[i % len(ids)] for i in range(requests)]
    prompts = tuple(Prompt(c, config.max_tokens) for c in chosen)
    return Workload(called, prompts, f"{origin}, {config.max_tokens} tokens each", temperature)


def _synthetic(
    name: str, requests: int, scale: float, random_: random.Random, vocabulary: int
) -> tuple[tuple[Prompt, ...], str]:
    """Return the prompts of a synthetic workload, and its shape in words."""
    prompts = []
    for _ in range(requests):
        lengths = FIXED[name] if name in FIXED else tuple(spread.draw(random_) for spread in MIXES[name])
        size, output = (max(round(n * scale), least) for n, least in zip(lengths, (4, 2), strict=True))
        prompts.append(Prompt(tuple(random_.choices(range(vocabulary), k=size)), output))
    if name in FIXED:
        return tuple(prompts), "{} in and {} out".format(*FIXED[name])
    sides = (f"{s.median:g} (spread {s.sigma:g}) {word}" for s, word in zip(MIXES[name], ("in", "out"), strict=True))
    return tuple(prompts), f"log-normal lengths of median {', '.join(sides)}"


def _from_file(path: str, requests: int, target: Target, *, chats: bool = False) -> list[list[int]]:
    """Return token ids of the first prompts of a file for `detgen run`; bad lines are refused anywhere in the file."""
    from detgen.errors import PromptsError, RequestError
    from detgen.params import SamplingParams
    from detgen.prompts import BadLine, open_prompts

    found: list[list[int]] = []
    try:
        source = open_prompts(path)
        for item in source.read(SamplingParams(), None):
            if isinstance(item, BadLine):
                raise BenchError(f"{item.error}; a benchmark takes only files without bad lines")
            if chats:
                item = replace(item, prompt=None, messages=[{"role": "user", "content": item.prompt}])
            if len(found) < requests:
                try:
                    found.append(target.encode(item))
                except RequestError as error:
                    raise BenchError(f"{source.name}:{item.line}: {error}") from error
    except PromptsError as error:
        raise BenchError(str(error)) from error
    return found
