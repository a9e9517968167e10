"""transformers' continuous batching (`generate_batch`), its manager set up before the clock runs."""

from __future__ import annotations

from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.transformers_generate import greedy

_PAGE = 256  # positions per page of its cache


class ContinuousPeer:
    """Runs jobs by the manager behind `model.generate_batch`."""

    packages = ("transformers",)

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        self._model = greedy(source)
        self._positions = source.positions

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """One, with its defaults."""
        name = "transformers-continuous"
        return [Contender(name, "generate_batch", source.plain_precision, name, self_checked=True)]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """All prompts at once; the manager batches them."""
        from transformers import ContinuousBatchingConfig

        # Older versions call it block_size.
        page = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
        config = ContinuousBatchingConfig(
            **{page: _PAGE},
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
            for index, name in enumerate(names):
                if done[name].error is not None:
                    raise RuntimeError(done[name].error)
                for at in done[name].timestamps or ():
                    clock.tokens(index, 1, at)
            return clock.outcome([list(done[name].generated_tokens) for name in names], None)
