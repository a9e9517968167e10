"""transformers' `generate` with `assistant_model`: speculative decoding, one prompt at a time."""

from __future__ import annotations

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import loaded
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of
from detgen.bench.peers.transformers_generate import generate, greedy


class AssistedPeer:
    """Runs jobs by `model.generate(assistant_model=...)`, whose batch size is 1."""

    name = "transformers-assisted"
    packages = ("transformers",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """One where there is a draft model."""
        if not source.has_draft:
            return []
        return [Variant("generate", precision_of(source), "transformers-assisted", most_batch=1)]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load both models."""
        import torch

        torch.set_num_threads(source.threads)
        self._model = greedy(loaded(source, "target").model)
        self._assistant = loaded(source, "draft").model
        self._assistant.generation_config.eos_token_id = None

    def run(self, variant: Variant, job: Job) -> Outcome:
        """One prompt after the other."""
        tokens: list[list[int]] = []
        clock = Clock(job)
        steps = 0
        for index in range(len(job.prompts)):
            made, passes = generate(self._model, job, range(index, index + 1), clock, assistant_model=self._assistant)
            tokens += made
            steps += passes
        return clock.outcome(tokens, steps)
