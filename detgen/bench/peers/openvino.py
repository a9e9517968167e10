"""OpenVINO GenAI on the CPU: continuous batching, plain and with a draft model.

optimum-intel converts the model. `f32` keeps arithmetic and cache in float32; `default` is OpenVINO's choice for the
processor, including a cache in 8 bits; `int8` is the same with weights in 8 bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import run_stepwise

_F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_DRAFT_TOKENS = 4  # per round of speculative decoding
_SPECULATIVE = "f32 speculative"


class OpenVinoPeer:
    """Runs jobs with `ContinuousBatchingPipeline`, request by request and step by step."""

    packages = ("openvino", "openvino-genai", "optimum-intel", "nncf")

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        import openvino

        core = openvino.Core()
        arithmetic, cached = (str(core.get_property("CPU", name)) for name in _F32)
        self._chosen = f"{_short(arithmetic)}, {_short(cached)} cache"
        self._fewer_bits = not _short(arithmetic) == _short(cached) == "f32"
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": source.threads}
        if contender.name not in ("default", "int8"):
            self._properties |= _F32
        self._speculative = contender.name == _SPECULATIVE
        self._models = [_converted(source, role) for role in ("target", "draft")[: 1 + self._speculative]]
        if contender.name == "int8":
            self._models = [_compressed(folder) for folder in self._models]
        self._positions = source.positions
        self._pipelines: dict[int, Any] = {}
        self._next = 0

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return contenders of three precisions, and float32 with a draft model if there is one."""
        if source.on_gpu or source.engine.target_quant != "none":
            return []
        found = [
            Contender("openvino", "f32", "float32", "openvino-f32"),
            Contender("openvino", "default", "default", "openvino-default", fewer_bits=True),
            Contender("openvino", "int8", "int8", "openvino-int8", fewer_bits=True),
        ]
        if source.has_draft and source.random_weights is None:  # it needs a tokenizer, which random weights do not have
            found.append(Contender("openvino", _SPECULATIVE, "float32", f"openvino-{_SPECULATIVE}", quick=False))
        return found

    def _pipeline(self, batch_size: int) -> Any:
        """Return the pipeline for a batch size, which it is built for."""
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

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run all prompts, at most a batch of them at a time."""
        import numpy as np
        import openvino
        import openvino_genai as genai

        pipeline = self._pipeline(job.batch_size)
        inputs = [openvino.Tensor(np.array([p.tokens], dtype=np.int64)) for p in job.prompts]
        handles: dict[int, Any] = {}

        def submit(index: int) -> None:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = job.prompts[index].output, True
            if self._speculative:
                config.num_assistant_tokens = _DRAFT_TOKENS
            handles[index] = pipeline.add_request(self._next, inputs[index], config)
            self._next += 1

        def step(live: Collection[int]) -> dict[int, list[int]]:
            pipeline.step()
            made: dict[int, list[int]] = {}
            for index in live:
                while handles[index].can_read():
                    new = [t for output in handles[index].read().values() for t in output.generated_ids]
                    made[index] = made.get(index, []) + new
            return made

        outcome = run_stepwise(job, submit, step)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        if contender.name == "default":
            outcome.precision, outcome.fewer_bits = self._chosen, self._fewer_bits
        return outcome


def _converted(source: ModelSource, role: str) -> Path:
    """Return a folder with the model in OpenVINO's format; an existing one is used as it is."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    folder = source.scratch / f"openvino-{role}"
    if not (folder / "openvino_model.bin").is_file():
        given = str(source.engine.target if role == "target" else source.engine.draft)
        main_export(
            given,
            folder,
            task="text-generation-with-past",
            library_name="transformers",
            stateful=True,
            convert_tokenizer=(Path(given) / "tokenizer.json").is_file(),  # speculative decoding needs one
            trust_remote_code=source.engine.trust_remote_code,
            ov_config=OVConfig(dtype="fp32"),
        )
        _give_an_end(folder / "config.json")
    return folder


def _compressed(plain: Path) -> Path:
    """Return a folder with the same model with weights in 8 bits."""
    import nncf
    import openvino

    folder = plain.with_name(f"{plain.name}-int8")
    if not (folder / "openvino_model.bin").is_file():
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
        model = nncf.compress_weights(openvino.Core().read_model(plain / "openvino_model.xml"))
        openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def _give_an_end(path: Path) -> None:
    """Give a configuration an end-of-sequence token, which pipelines require even if they ignore it."""
    config = json.loads(path.read_text())
    if config.get("eos_token_id") is None:
        path.write_text(json.dumps(config | {"eos_token_id": 0}))


def _short(element: str) -> str:
    """Return `bf16` for `<Type: 'bfloat16'>`, and likewise for other types."""
    name = element.split("'")[1] if "'" in element else element
    return {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "uint8_t": "u8"}.get(name, name)
