"""Whole runs by kernels in Triton, in calls of several passes that read prompts: what a run on a CPU gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import transformers as hf
from helpers.examples import thorough
from helpers.foreseeing import interpreted, said

from detgen import Engine, Request, SamplingParams
from detgen.kernels.attention import BLOCK
from detgen.kernels.triton import triton_decoder
from detgen.kernels.triton.triton_decoder import TritonDecoder

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4096,
}  # fmt: skip
CASES = "plain", "small memory", "stops", "not finite", "log-probabilities", "penalties"

_COUNT = 7


@pytest.fixture(scope="module")
def pair(random_model: Callable[..., Path]) -> tuple[Engine, Engine]:
    """Engines of a tiny model: by kernels in Triton, and by the compiled library."""
    folder = str(random_model(hf.LlamaConfig(**SIZES)))
    with interpreted():
        engine = Engine(target=folder, drafter="none", kv_memory=1 << 20)
    assert isinstance(engine.canonical.decoder, TritonDecoder)
    return engine, Engine(target=folder, drafter="none", kv_memory=1 << 20)


def requests(*, logprobs: bool = False, penalty: float = 0.0, stop: tuple[int, ...] = ()) -> list[Request]:
    """Greedy and sampled, short and long, some that begin alike, of several lengths."""
    start = tuple(100 + 3 * i for i in range(70))
    return [
        Request(
            i, i,
            token_ids=start[: 11 * i % 66] + tuple(200 + 7 * i + j for j in range(1 + 5 * i % 17)),
            params=SamplingParams(
                max_tokens=1 + 4 * i % 9, temperature=0.9 * (i % 3 > 0), top_p=0.95 if i % 2 else 1.0, seed=i,
                ignore_eos=True, stop_token_ids=stop, logprobs=2 if logprobs and i == 2 else None,
                frequency_penalty=penalty * (i % 3), repetition_penalty=1 + penalty * (i % 2), min_tokens=i % 2,
            ),
        )
        for i in range(_COUNT)
    ]  # fmt: skip


@thorough
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_a_cpu(pair: tuple[Engine, Engine], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few fetches for many passes, where nothing but tokens is asked."""
    settings: dict[str, Any] = {"batch_size": 4, "prefill_chunk": 20}
    if case == "small memory":
        settings["kv_memory"] = 3 * BLOCK * pair[0].canonical.cache.entry_bytes
    waits, fetched = [], triton_decoder.fetched
    monkeypatch.setattr(triton_decoder, "fetched", lambda x: waits.append(1) or fetched(x))
    by_triton, by_c = (engine.with_settings(**settings) for engine in pair)
    stop = ()
    if case == "stops":
        stop = tuple({c.token_ids[-2] for c in by_c.generate(requests()) if len(c.token_ids) > 3})
    found, asks = [], {"logprobs": case == "log-probabilities", "penalty": 0.7 if case == "penalties" else 0.0}
    for engine in (by_triton, by_c):
        with engine.canonical.decoder.breaking(100 + 3 * 30) if case == "not finite" else nullcontext():
            found.append(
                said(
                    engine,
                    requests(**asks, stop=stop),
                )
            )
    assert found[0] == found[1]
    errors = [key for key, told in found[0].items() if told[3]]
    assert bool(errors) == (case == "not finite")
    assert len(errors) < _COUNT
    if case == "small memory":
        assert by_triton.stats.preemptions
    assert by_triton.stats.reused_tokens
    assert len(waits) <= 0.6 * by_triton.stats.target_passes
