"""The part of `structured.py` that OpenVINO GenAI runs, in an environment of its own: JSON in, JSON out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openvino_genai as genai


def main() -> None:
    """Reads a line with model, threads, schema and most tokens; then answers each line with seconds and token counts.

    Such a line has a batch size, prompts, and how many tokens each gets; null where the texts have the schema.
    """
    asked = json.loads(sys.stdin.readline())
    pipelines: dict[int, Any] = {}
    for line in sys.stdin:
        batch, counts, prompts = (json.loads(line)[key] for key in ("batch", "counts", "prompts"))
        if batch not in pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.max_num_seqs, scheduler.enable_prefix_caching, scheduler.cache_size = batch, False, 1
            precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
            properties = {**precision, "INFERENCE_NUM_THREADS": asked["threads"]}
            pipelines[batch] = genai.ContinuousBatchingPipeline(asked["model"], scheduler, "CPU", properties=properties)
        pipeline, handles = pipelines[batch], []
        started = time.perf_counter()
        for i, (prompt, count) in enumerate(zip(prompts, counts or [None] * len(prompts), strict=True)):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = count or asked["limit"], count is not None
            config.apply_chat_template = False
            if count is None:
                config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(asked["schema"]))
            handles.append(pipeline.add_request(i, prompt, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds = time.perf_counter() - started
        tokens = [sum(len(output.generated_ids) for output in handle.read_all()) for handle in handles]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
