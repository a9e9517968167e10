"""transformers' `generate` in static batches, on the model as transformers makes it.

Batches are taken in the order of the prompts, padded on the left, and run until their longest member has its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import loaded
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of


class GeneratePeer:
    """Runs jobs by `model.generate`."""

    name = "transformers"
    packages = ("transformers",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """One: as it comes."""
        return [Variant("generate", precision_of(source), "transformers", self_checked=True)]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        import torch

        torch.set_num_threads(source.threads)
        self._model = greedy(loaded(source, "target").model)

    def run(self, variant: Variant, job: Job) -> Outcome:
        """One batch after the other."""
        tokens: list[list[int]] = []
        clock = Clock(job)
        steps = 0
        for start in range(0, len(job.prompts), job.batch_size):
            batch = range(start, min(start + job.batch_size, len(job.prompts)))
            made, passes = generate(self._model, job, batch, clock)
            tokens += made
            steps += passes
        return clock.outcome(tokens, steps)


def greedy(model: Any) -> Any:
    """The model with generation settings that end nothing before its number of tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def generate(model: Any, job: Job, batch: range, clock: Clock, **extra: Any) -> tuple[list[list[int]], int]:
    """Generate for some prompts of a job together; their tokens, and the passes of the model."""
    import torch

    prompts = [job.prompts[i] for i in batch]
    width = max(len(p.tokens) for p in prompts)
    pad = [width - len(p.tokens) for p in prompts]
    ids = torch.tensor([[0] * n + list(p.tokens) for n, p in zip(pad, prompts, strict=True)], device=model.device)
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in pad], device=model.device)
    steps = 0
    seen = width

    def step(length: int) -> None:
        nonlocal steps, seen
        steps += 1
        for index in batch:
            clock.tokens(index, length - seen)
        seen = length

    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(p.output for p in prompts),
            stopping_criteria=[_watch(step)],
            **extra,
        )
    rows = out[:, width:].tolist()
    return [row[: p.output] for row, p in zip(rows, prompts, strict=True)], steps


def _watch(step: Callable[[int], None]) -> Any:
    """A stopping criterion that stops nothing and tells how long the sequences have become."""
    import torch
    from transformers import StoppingCriteria

    class Watch(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            step(input_ids.shape[1])
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return Watch()
