"""vLLM, plain and batch-invariant, driven request by request so that no more than a batch is under way.

What is called here was checked against the source of vLLM 0.33.0.
"""

from __future__ import annotations

from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.models import folder
from detgen.bench.peers.clock import Clock
from detgen.bench.peers.detgen_engine import precision_of

_SHARE = 0.35  # of the GPU's memory that one vLLM may take beside its peers


class VllmPeer:
    """Runs jobs by `LLMEngine.step`."""

    name = "vllm"
    packages = ("vllm",)

    def variants(self, source: ModelSource) -> list[Variant]:
        """Plain, and with its batch-invariant kernels; on GPUs alone."""
        if not source.device.startswith("cuda") or source.target_quant != "none":
            return []
        # In one process with its caller, so that the time of each step is seen; and nothing is reported to its makers.
        base = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1"))
        precision = precision_of(source)
        return [
            Variant("plain", precision, "vllm", base),
            Variant("batch-invariant", precision, "vllm-invariant", (*base, ("VLLM_BATCH_INVARIANT", "1"))),
        ]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        index = source.device.partition(":")[2]
        arguments = EngineArgs(
            model=str(folder(source, "target")),
            skip_tokenizer_init=True,
            dtype=source.dtype,
            # `positions` has one to spare, and it refuses more than the model's context.
            max_model_len=source.positions - 1,
            max_num_seqs=max(batch_sizes),
            gpu_memory_utilization=_SHARE,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=source.seed,
            **({"device_ids": [int(index)]} if index else {}),  # older versions have no such argument
        )
        # As its own class for offline use does: in others a pass reads fewer tokens of prompts.
        self._engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self._next = 0

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts, at most a batch of them at a time."""
        tokens: list[list[int]] = [[] for _ in job.prompts]
        waiting = list(range(len(job.prompts)))[::-1]
        live: dict[str, int] = {}
        passes = 0
        clock = Clock(job)
        while waiting or live:
            while waiting and len(live) < job.batch_size:
                index = waiting.pop()
                live[self._submit(job, index)] = index
            outputs: list[Any] = self._engine.step()
            # It begins passes a step ahead: a step that gives nothing only fills or drains that, or has ended a pass
            # that read a part of a long prompt alone.
            passes += bool(outputs)
            for output in outputs:
                index = live[output.request_id]
                made = output.outputs[0].token_ids
                clock.tokens(index, len(made))
                tokens[index] += made
                if output.finished:
                    del live[output.request_id]
        return clock.outcome(tokens, passes)

    def _submit(self, job: Job, index: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt = job.prompts[index]
        name, self._next = str(self._next), self._next + 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,  # each step gives the tokens that are new
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt.tokens)}, params)
        return name
