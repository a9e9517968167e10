"""SGLang, plain and deterministic, with at most a batch of requests under way."""

from __future__ import annotations

import asyncio
from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import folder
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of

_SHARE = 0.35  # of the GPU's memory that one SGLang may take beside its peers


class SglangPeer:
    """Runs jobs by `Engine.async_generate`; how many passes its processes run is not told."""

    name = "sglang"
    packages = ("sglang",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """Plain, and with --enable-deterministic-inference; on GPUs alone."""
        if not source.device.startswith("cuda") or source.target_quant != "none":
            return []
        precision = precision_of(source)
        return [Variant("plain", precision, "sglang"), Variant("deterministic", precision, "sglang-deterministic")]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        import sglang

        self._engine = sglang.Engine(
            model_path=str(folder(source, "target")),
            skip_tokenizer_init=True,
            dtype=source.dtype,
            context_length=source.positions,
            max_running_requests=max(batch_sizes),
            mem_fraction_static=_SHARE,
            disable_radix_cache=True,
            enable_deterministic_inference=variant.name == "deterministic",
            random_seed=source.seed,
        )

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts, at most a batch of them at a time."""
        return asyncio.get_event_loop().run_until_complete(self._run(job))

    async def _run(self, job: Job) -> Outcome:
        places = asyncio.Semaphore(job.batch_size)
        tokens: list[list[int]] = [[] for _ in job.prompts]
        clock = Clock(job)

        async def one(index: int) -> None:
            prompt = job.prompts[index]
            params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": prompt.output, "ignore_eos": True}
            async with places:
                stream = await self._engine.async_generate(
                    input_ids=list(prompt.tokens), sampling_params=params, stream=True
                )
                async for part in stream:
                    made = list(part["output_ids"])
                    clock.tokens(index, len(made) - len(tokens[index]))
                    tokens[index] = made

        await asyncio.gather(*(one(i) for i in range(len(job.prompts))))
        return clock.outcome(tokens, None)
