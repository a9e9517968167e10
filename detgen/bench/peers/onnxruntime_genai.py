"""ONNX Runtime GenAI on the CPU: static batches, in float32 or with weights in 4 bits.

Its own builder converts the model, which needs torch and transformers. Batches are taken in the order of the prompts
and run until their longest member has its tokens. Shorter prompts are padded on the right, as it expects.
End-of-sequence tokens are not generated before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import Clock

_KINDS = {"f32": "fp32", "int4": "int4"}


class OnnxRuntimePeer:
    """Runs jobs by `Generator.generate_next_token`."""

    packages = ("onnxruntime-genai", "onnxruntime", "onnx-ir", "torch", "transformers")

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        import onnxruntime_genai as genai

        folder, given = source.scratch / f"onnxruntime-{contender.name}", str(source.engine.target)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", given, "-o", str(folder)]
        how = ["-p", _KINDS[contender.name], "-e", "cpu", "-c", str(source.scratch / "onnxruntime-cache")]
        subprocess.run([*builder, *how], stdin=subprocess.DEVNULL, check=True)
        settings = folder / "genai_config.json"
        told = json.loads(settings.read_text())
        self._pad = told["model"]["pad_token_id"]
        options = told["model"]["decoder"]["session_options"]
        options["intra_op_num_threads"] = source.threads
        settings.write_text(json.dumps(told))
        self._model = genai.Model(str(folder))

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return two contenders, float32 and 4 bits, each in its own process."""
        # The builder copies a tokenizer, which random weights do not have.
        if source.on_gpu or source.engine.target_quant != "none" or source.random_weights is not None:
            return []
        return [
            Contender("onnxruntime", "f32", "float32", "onnxruntime-f32"),
            Contender("onnxruntime", "int4", "int4", "onnxruntime-int4", fewer_bits=True),
        ]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run one batch after the other."""
        import numpy as np
        import onnxruntime_genai as genai

        tokens: list[list[int]] = [[] for _ in job.prompts]
        passes, clock = 0, Clock(job)
        for start in range(0, len(job.prompts), job.batch_size):
            batch = job.prompts[start : start + job.batch_size]
            longest, most = max(len(p.tokens) for p in batch), max(p.output for p in batch)
            rows: Any = [[*p.tokens, *[self._pad] * (longest - len(p.tokens))] for p in batch]
            params, end = genai.GeneratorParams(self._model), longest + most
            params.set_search_options(batch_size=len(batch), max_length=end, min_length=end, do_sample=False)
            generator = genai.Generator(self._model, params)
            generator.append_tokens(np.array(rows, np.int32))
            for _ in range(most):
                generator.generate_next_token()
                passes += 1
                for i, token in enumerate(generator.get_next_tokens()):
                    tokens[start + i].append(int(token))
                    clock.tokens(start + i, 1)
        return clock.outcome([made[: p.output] for made, p in zip(tokens, job.prompts, strict=True)], passes)
