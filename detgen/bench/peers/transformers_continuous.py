"""transformers' continuous batching (`generate_batch`), its manager set up before the clock runs."""

from __future__ import annotations

from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import loaded
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of
from detgen.bench.peers.transformers_generate import greedy

_PAGE = 256  # positions a page of its cache


class ContinuousPeer:
    """Runs jobs by the manager behind `model.generate_batch`."""

    name = "transformers-continuous"
    packages = ("transformers",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """One: as it comes."""
        return [Variant("generate_batch", precision_of(source), "transformers-continuous", self_checked=True)]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        import torch

        torch.set_num_threads(source.threads)
        self._model = greedy(loaded(source, "target").model)
        self._positions = source.positions

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts at once; the manager batches them."""
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=job.batch_size * -(-self._positions // _PAGE) + 2,
            max_batch_tokens=max(512, job.batch_size),
            max_requests_per_batch=job.batch_size,
        )
        with self._model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            clock = Clock(job)
            names = [
                manager.add_request(list(p.tokens), max_new_tokens=p.output, record_timestamps=True)
                for p in job.prompts
            ]
            done: dict[str, Any] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result
                elif not manager.is_running():
                    raise RuntimeError("its generation thread ended")
            results = [done[name] for name in names]
            for index, result in enumerate(results):
                if result.error is not None:
                    raise RuntimeError(result.error)
                for at in result.timestamps or ():
                    clock.tokens(index, 1, at)
            return clock.outcome([list(r.generated_tokens) for r in results], None)
