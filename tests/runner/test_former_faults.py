"""Settings in which rows once depended on neighbours or threads: their bits are those that they have alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.threads import using

from detgen import Engine
from detgen.kernels.input_batch import Window
from detgen.program.arrays import same_bits

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
WIDE: dict[str, Any] = {**SMALL, "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16}
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    # A sigmoid over [rows, 1] ended in scalar code.
    "qwen2_moe": (
        lambda: hf.Qwen2MoeConfig(
            **SMALL,
            intermediate_size=96,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        (85, 110, 123),
    ),
    # The last elements of a thread's part took scalar code.
    "starcoder2": (lambda: hf.Starcoder2Config(**SMALL, intermediate_size=513), (33, 64, 65, 100, 127)),
    # The router went through another kernel for each number of threads.
    "mixtral": (
        lambda: hf.MixtralConfig(**WIDE, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2),
        (2, 4, 8, 16, 128),
    ),
}
TOKENS = [(11 * i + i * i) % 61 + 2 for i in range(128)]
BROKEN = 1


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> tuple[Engine, tuple[int, ...]]:
    config, rows = MODELS[request.param]
    return Engine(target=random_model(config()), drafter="none", kv_memory=32 << 20), rows


def read(engine: Engine, rows: int, threads: int, neighbours: tuple[list[int], list[int]] = ([], [])) -> Any:
    """Logits and cache entries of tokens read in passes of `rows` rows, behind and before those of neighbours."""
    forward, (before, behind) = engine.canonical, neighbours
    forward.cache.pages.lay_out(3, 256)
    logits = []
    with using(threads):
        for at in range(0, len(TOKENS), rows):
            part = TOKENS[at : at + rows]
            windows = [Window(0, at, part, len(part))]
            windows = [Window(1, 0, before, 0)] * bool(before) + windows + [Window(2, 5, behind, 0)] * bool(behind)
            logits.append(forward.run(windows))
    return np.concatenate(logits), *forward.cache.entries(0, 0, len(TOKENS))


def test_rows_are_the_same_in_passes_of_any_size(case: tuple[Engine, tuple[int, ...]]) -> None:
    engine, sizes = case
    want = read(engine, 1, 1)
    for rows in sizes:
        for threads in (1, 2):
            assert all(same_bits(a, b) for a, b in zip(read(engine, rows, threads), want, strict=True)), (rows, threads)


def test_a_row_of_nan_harms_nobody_beside_it(case: tuple[Engine, tuple[int, ...]]) -> None:
    engine, _ = case
    want = read(engine, 64, 2)
    with engine.canonical.decoder.breaking(BROKEN):
        found = read(engine, 64, 2, ([5, BROKEN, 7], [BROKEN] * 9))
        forward = engine.canonical
        broken: list[int] = []
        forward.run([Window(0, 0, [4, BROKEN, 4], 1)], broken)
    assert broken[:1] == [1], "the row was broken"
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))
