"""SGLang, plain and deterministic, with at most a batch of requests under way.

What is called here was checked against the source of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import gc
from multiprocessing.util import Finalize
from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import folder
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of

_SHARE = 0.5  # of the GPU's memory that is free when it starts, for its weights and its cache
_SPARE = 8  # positions of its context that it gives to no prompt and no output


class SglangPeer:
    """Runs jobs by `Engine.async_generate`; how many passes its processes run is not told."""

    name = "sglang"
    packages = ("sglang",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """Plain, and with --enable-deterministic-inference; on GPUs alone."""
        if not source.device.startswith("cuda") or source.target_quant != "none":
            return []
        precision = precision_of(source)
        # The model's context may end with the longest sequence; what is spared beyond it is never reached.
        base = (("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1"),)
        return [
            Variant("plain", precision, "sglang", base),
            Variant("deterministic", precision, "sglang-deterministic", base),
        ]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        import sglang
        import torch

        model = folder(source, "target")
        # Random weights were made in this process; it computes in others, which need the memory.
        gc.collect()
        torch.cuda.empty_cache()
        self._engine = sglang.Engine(
            model_path=str(model),
            skip_tokenizer_init=True,
            dtype=source.dtype,
            context_length=source.positions + _SPARE,
            max_running_requests=max(batch_sizes),
            mem_fraction_static=_SHARE,
            disable_radix_cache=True,
            enable_deterministic_inference=variant.name == "deterministic",
            random_seed=source.seed,
            base_gpu_id=int(source.device.partition(":")[2] or 0),
        )
        # Its own end is left to atexit, before which a child of multiprocessing waits for its processes, for ever.
        Finalize(None, self._engine.shutdown, exitpriority=0)

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts, at most a batch of them at a time."""
        # The loop that the engine has made the current one; its sockets belong to it.
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
                    made = part["output_ids"][len(tokens[index]) :]  # each part has all tokens so far
                    clock.tokens(index, len(made))
                    tokens[index] += made

        await asyncio.gather(*(one(i) for i in range(len(job.prompts))))
        return clock.outcome(tokens, None)
