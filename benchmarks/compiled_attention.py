"""The compiled attention beside torch's fused kernel: single tiles, and whole generations, in turns in one process.

python benchmarks/compiled_attention.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detgen import Engine, Request, SamplingParams  # isort: skip  # before torch: see canonical_pass
import torch
from canonical_pass import interleaved

from detgen.kernels import compiled
from detgen.kernels.attention import AttentionTraits, attend_fused

TILES = ((16, 4, 192), (4, 8, 192), (8, 128, 192), (8, 128, 384))  # slots, rows, keys; 2 KV heads of 64 entries
GENERATIONS = (("none", 16), ("auto", 16), ("none", 1))  # drafter, batch size
ROUNDS = 4


def tile(slots: int, rows: int, keys: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of one tile."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(slots, 2, rows, 64, generator=g).to(dtype)
    k, v = (torch.randn(slots, 1024, 2, 64, generator=g).to(dtype)[:, :keys] for _ in range(2))
    arguments = q, k, v, torch.zeros(slots, 1, rows, keys, dtype=dtype), AttentionTraits(0.125)
    with torch.inference_mode():
        ways = {"compiled": lambda: compiled.attend_compiled(*arguments), "fused": lambda: attend_fused(*arguments)}
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
        for shape in TILES:
            report(f"{dtype}, slots, rows, keys {shape}", tile(*shape, dtype))
    for drafter, batch_size in GENERATIONS:
        report(f"{drafter}, batch {batch_size}", generation(drafter, batch_size))
