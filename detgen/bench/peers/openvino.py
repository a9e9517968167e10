"""OpenVINO GenAI on the CPU: continuous batching, plain and with a draft model.

The model is converted on the fly (`openvino_model`). `f32` holds arithmetic and cache to float32; `default` is what
OpenVINO chooses for the processor, of which its cache in 8 bits is a part.
"""

from __future__ import annotations

from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.peers.clock import Clock

_F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_DRAFTED = 4  # tokens a round of speculative decoding


class OpenVinoPeer:
    """Runs jobs by `ContinuousBatchingPipeline`, request by request and step by step."""

    name = "openvino"
    packages = ("openvino", "openvino-genai")

    def variants(self, source: ModelSource) -> list[Variant]:
        """Two precisions; float32 with a draft model too, where there is one."""
        if source.device != "cpu" or source.target_quant != "none":
            return []
        names = {"f32": "float32", "default": "default"}
        if source.has_draft:
            names["f32 speculative"] = "float32"
        return [Variant(name, precision, f"openvino-{name}") for name, precision in names.items()]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Convert and compile."""
        import openvino

        from detgen.bench.peers.openvino_model import write_model

        core = openvino.Core()
        arithmetic, cached = (str(core.get_property("CPU", name)) for name in _F32)
        self._chosen = f"{_short(arithmetic)}, {_short(cached)} cache"
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": source.threads}
        if variant.name != "default":
            self._properties |= _F32
        self._speculative = variant.name.endswith("speculative")
        self._models = [write_model(source, role) for role in ("target", "draft")[: 1 + self._speculative]]
        self._positions = source.positions
        self._pipelines: dict[int, Any] = {}
        self._next = 0

    def _pipeline(self, batch_size: int) -> Any:
        """One for each batch size, which it is built for."""
        import openvino_genai as genai

        if batch_size not in self._pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.max_num_seqs = batch_size
            scheduler.enable_prefix_caching = False
            scheduler.num_kv_blocks = batch_size * (-(-self._positions // 32) + 2)
            extra = {}
            if self._speculative:
                extra["draft_model"] = genai.draft_model(self._models[1], "CPU", **self._properties)
            self._pipelines[batch_size] = genai.ContinuousBatchingPipeline(
                self._models[0], scheduler, "CPU", properties=self._properties | extra
            )
        return self._pipelines[batch_size]

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts, at most a batch of them at a time."""
        import numpy as np
        import openvino

        pipeline = self._pipeline(job.batch_size)
        inputs = [openvino.Tensor(np.array([p.tokens], dtype=np.int64)) for p in job.prompts]
        tokens: list[list[int]] = [[] for _ in job.prompts]
        passes = 0
        clock = Clock(job)
        waiting = list(range(len(job.prompts)))[::-1]
        live: dict[int, Any] = {}
        while waiting or live:
            while waiting and len(live) < job.batch_size:
                index = waiting.pop()
                live[index] = pipeline.add_request(self._next, inputs[index], self._config(job.prompts[index].output))
                self._next += 1
            pipeline.step()
            passes += 1
            for index, handle in list(live.items()):
                while handle.can_read():
                    new = [t for output in handle.read().values() for t in output.generated_ids]
                    tokens[index] += new
                    clock.tokens(index, len(new))
                if len(tokens[index]) >= job.prompts[index].output:
                    del live[index]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        made = [row[: p.output] for row, p in zip(tokens, job.prompts, strict=True)]
        outcome = clock.outcome(made, passes)
        if variant.name == "default":
            outcome.precision = self._chosen
        return outcome

    def _config(self, output: int) -> Any:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = output, True
        if self._speculative:
            config.num_assistant_tokens = _DRAFTED
        return config


def _short(element: str) -> str:
    """`bf16` from `<Type: 'bfloat16'>`."""
    name = element.split("'")[1] if "'" in element else element
    return {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "uint8_t": "u8"}.get(name, name)
