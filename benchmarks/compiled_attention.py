"""The compiled attention beside torch's fused kernel: single layers, and whole generations, in turns in one process.

python benchmarks/compiled_attention.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from detgen import Engine, Request, SamplingParams  # isort: skip  # before torch: see canonical_pass
import torch
from canonical_pass import interleaved

from detgen.kernels import compiled
from detgen.kernels.attention import BLOCK, AttentionTraits, attend_fused
from detgen.passes.packing import FREE_SHAPES, Window, Windows, pack

# Windows, tokens and context of each; 4 heads, 2 KV heads of 64 entries.
PASSES = ((1, 1, 200), (16, 1, 200), (16, 5, 200), (256, 1, 200), (1, 511, 0))
GENERATIONS = (("none", 16), ("auto", 16), ("none", 1))  # drafter, batch size
ROUNDS = 4


def layer(windows: int, tokens: int, context: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of the attention of a pass in one layer, over pages in any order."""
    g = torch.Generator().manual_seed(0)
    blocks = -(-(context + tokens) // BLOCK)
    pages = windows * blocks
    tables = torch.randperm(pages, generator=g).view(windows, blocks).numpy()
    q = torch.randn(windows * tokens, 4, 64, generator=g).to(dtype)
    k, v = (torch.randn((pages + 1) * BLOCK, 2, 64, generator=g).to(dtype) for _ in range(2))
    packed = Windows.of(Window(slot, context, [0] * tokens, 0) for slot in range(windows))
    ways: dict[str, Callable[[], object]] = {}
    for name, attend in (("compiled", None), ("fused", attend_fused)):
        shapes = replace(FREE_SHAPES, attend=attend)
        one = pack(packed, shapes, tables, pages * BLOCK, 2, q.device)
        ways[name] = partial(one.attend, q, k, v, AttentionTraits(0.125))
    with torch.inference_mode():
        return interleaved(ways, 50)


def generation(drafter: Any, batch_size: int) -> dict[str, float]:
    """Milliseconds of 32 sample prompts by 64 tokens, on the embedded models."""
    library = compiled._library
    lines = Path(__file__).parent.parent.joinpath("sample_prompts", "code.jsonl").read_text().splitlines()[:32]
    params = SamplingParams(max_tokens=64)
    requests = [Request(i, i, prompt=json.loads(line)["prompt"], params=params) for i, line in enumerate(lines)]

    def made(found: Callable[[], Any]) -> Callable[[], Any]:
        compiled._library = found
        engine = Engine(drafter=drafter, batch_size=batch_size, prefix_cache=False)

        def run() -> None:
            compiled._library = found
            engine.generate(requests)

        return run

    try:
        return interleaved({"compiled": made(library), "fused": made(lambda: None)}, ROUNDS)
    finally:
        compiled._library = library


def report(what: str, ms: dict[str, float]) -> None:
    """One line."""
    ratio = ms["fused"] / ms["compiled"]
    print(f"{what}: {ms['compiled']:.3f} ms, fused {ms['fused']:.3f}: {ratio:.2f} times as fast")


if __name__ == "__main__":
    print(f"{compiled.build()}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in PASSES:
            report(f"{dtype}, windows, tokens, context {shape}", layer(*shape, dtype))
    for drafter, batch_size in GENERATIONS:
        report(f"{drafter}, batch {batch_size}", generation(drafter, batch_size))
