"""SGLang, plain and deterministic, with at most a batch of requests at a time.

The calls here were checked against the source of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import gc
from multiprocessing.util import Finalize
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import Clock

_SHARE = 0.5  # of the GPU memory that is free at its start, for weights and cache
_SPARE = 8  # positions of its context that it uses for no prompt and no output


class SglangPeer:
    """Runs jobs with `Engine.async_generate`; its number of passes is unknown."""

    packages = ("sglang",)

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        import sglang
        import torch

        arguments = settings(source, contender, max(batch_sizes))
        # Random weights were made in this process; SGLang computes in other processes, which need the memory.
        gc.collect()
        torch.cuda.empty_cache()
        self._engine = sglang.Engine(**arguments)
        # It shuts down in atexit; a child of multiprocessing waits for its own children before that, forever.
        Finalize(None, self._engine.shutdown, exitpriority=0)

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return two contenders, plain and with --enable-deterministic-inference; none on CPUs."""
        if not source.on_gpu or source.engine.target_quant != "none":
            return []
        # The model's context may end with the longest sequence; the spare positions beyond it are never reached.
        base = (("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1"),)
        return [
            Contender("sglang", "plain", source.precision, "sglang", base),
            Contender("sglang", "deterministic", source.precision, "sglang-deterministic", base, quick=False),
        ]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run all prompts, at most a batch of them at a time."""
        # The engine has made this loop the current one, and its sockets belong to it.
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


def settings(source: ModelSource, contender: Contender, most_requests: int) -> dict[str, Any]:
    """Return the arguments of the engine."""
    return {
        "model_path": source.engine.target,
        "trust_remote_code": source.engine.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": source.engine.dtype,
        "context_length": source.positions + _SPARE,
        "max_running_requests": most_requests,
        "mem_fraction_static": _SHARE,
        "disable_radix_cache": True,
        "enable_deterministic_inference": contender.name == "deterministic",
        "random_seed": source.seed,
        "base_gpu_id": int(source.engine.device.partition(":")[2] or 0),
    }
