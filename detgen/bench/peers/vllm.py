"""vLLM, plain and batch-invariant, driven request by request so that no more than a batch is under way."""

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
        # In one process with its caller, so that the time of each step is seen.
        base = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),)
        precision = precision_of(source)
        return [
            Variant("plain", precision, "vllm", base),
            Variant("batch-invariant", precision, "vllm-invariant", (*base, ("VLLM_BATCH_INVARIANT", "1"))),
        ]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load the model."""
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder(source, "target")),
                skip_tokenizer_init=True,
                dtype=source.dtype,
                max_model_len=source.positions,
                max_num_seqs=max(batch_sizes),
                gpu_memory_utilization=_SHARE,
                enable_prefix_caching=False,
                seed=source.seed,
            )
        )
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
            passes += 1
            for output in outputs:
                index = live[output.request_id]
                made = list(output.outputs[0].token_ids)
                clock.tokens(index, len(made) - len(tokens[index]))
                tokens[index] = made
                if output.finished:
                    del live[output.request_id]
        return clock.outcome(tokens, passes)

    def _submit(self, job: Job, index: int) -> str:
        from vllm import SamplingParams

        prompt = job.prompts[index]
        name, self._next = str(self._next), self._next + 1
        params = SamplingParams(temperature=0.0, max_tokens=prompt.output, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt.tokens)}, params)
        return name
