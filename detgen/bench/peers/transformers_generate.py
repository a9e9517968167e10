"""transformers with its own forward: `generate` in static batches, with a draft model, and `generate_batch`.

Static batches are taken in the order of the prompts, padded on the left, and run until their longest member has its
tokens.
"""

from __future__ import annotations

from typing import Any

from detgen.bench.model_source import own_forward
from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import Clock

_PAGE = 256  # positions per page of the cache of `generate_batch`


class GeneratePeer:
    """Runs jobs with `model.generate`."""

    packages: tuple[str, ...] = ("transformers",)

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        self._model = greedy(source)
        self._options: dict[str, Any] = {}  # arguments of each call

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return one contender, with its defaults."""
        return [Contender("transformers", "generate", source.plain_precision, "transformers", self_checked=True)]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run one batch after the other."""
        tokens: list[list[int]] = []
        clock = Clock(job)
        passes = 0
        for start in range(0, len(job.prompts), job.batch_size):
            batch = range(start, min(start + job.batch_size, len(job.prompts)))
            made, steps = self._generate(job, batch, clock)
            tokens += made
            passes += steps
        return clock.outcome(tokens, passes)

    def _generate(self, job: Job, batch: range, clock: Clock) -> tuple[list[list[int]], int]:
        """Generate for some prompts of a job together; return their tokens and the number of passes."""
        import torch
        from transformers import StoppingCriteria

        prompts = [job.prompts[i] for i in batch]
        width = max(len(p.tokens) for p in prompts)
        pad = [width - len(p.tokens) for p in prompts]
        lengths = [width]  # of the sequences, before the first and after each pass

        class Watch(StoppingCriteria):  # stops nothing
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                lengths.append(input_ids.shape[1])
                for index in batch:
                    clock.tokens(index, lengths[-1] - lengths[-2])
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        device = self._model.device
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=torch.tensor(
                    [[0] * n + list(p.tokens) for n, p in zip(pad, prompts, strict=True)], device=device
                ),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pad], device=device),
                max_new_tokens=max(p.output for p in prompts),
                stopping_criteria=[Watch()],
                **self._options,
            )
        rows = out[:, width:].tolist()
        return [row[: p.output] for row, p in zip(rows, prompts, strict=True)], len(lengths) - 1


def greedy(source: ModelSource) -> Any:
    """Load the target with generation settings without end-of-sequence tokens; sets the CPU threads, too."""
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(source.threads)
    model = own_forward(source, "target")
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


class ContinuousPeer:
    """Runs jobs with continuous batching, the manager of `model.generate_batch`, set up before the clock starts."""

    packages = ("transformers",)

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        self._model = greedy(source)
        self._positions = source.positions

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return one contender, with its defaults."""
        name = "transformers-continuous"
        return [Contender(name, "generate_batch", source.plain_precision, name, self_checked=True)]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run all prompts at once; the manager batches them."""
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


class AssistedPeer(GeneratePeer):
    """Runs jobs with `model.generate(assistant_model=...)`: speculative decoding, at batch size 1 only."""

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        super().__init__(source, contender, batch_sizes)
        assistant = own_forward(source, "draft")
        assistant.generation_config.eos_token_id = None
        self._options = {"assistant_model": assistant}

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return one contender if there is a draft model."""
        if not source.has_draft:
            return []
        return [
            Contender(
                "transformers-assisted", "generate", source.plain_precision, "transformers-assisted", most_batch=1
            )
        ]
