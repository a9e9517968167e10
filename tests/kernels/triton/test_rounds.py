"""Whole runs by kernels in Triton, in calls of several rounds that draft and verify: what a run on a CPU gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import transformers as hf
from helpers.examples import thorough
from helpers.foreseeing import interpreted, said

from detgen import Engine, Request, SamplingParams
from detgen.kernels.triton import triton_decoder
from detgen.kernels.triton.triton_decoder import TritonDecoder

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4096,
}  # fmt: skip
_COUNT = 3


@pytest.fixture(scope="module")
def pairs(random_model: Callable[..., Path]) -> list[Engine]:
    """Engines of a tiny model that drafts for itself, or with itself: by kernels in Triton, and by the library."""
    folder = str(random_model(hf.LlamaConfig(**SIZES)))
    given: dict[str, Any] = {"target": folder, "draft": folder, "drafter": "auto", "kv_memory": 2 << 20}
    with interpreted():
        engine = Engine(**given)
    assert isinstance(engine.canonical.decoder, TritonDecoder)
    return [engine, Engine(**given)]


def requests(temperature: float) -> list[Request]:
    """Of several lengths, which end in the middle of a window, of a page or of a call; one is not verified, and one is
    of two tokens, which n-grams foresee."""
    how = [
        SamplingParams(
            max_tokens=(9, 8, 14)[i], temperature=temperature * (i != 0), seed=i, ignore_eos=True,
            deterministic=i != 0, logprobs=2 if i == 1 else None, top_p=0.9 if i == 2 else 1.0,
            frequency_penalty=0.5 * (i == 2), logit_bias={210: 90, 211: 90} if i == 2 else {},
        )
        for i in range(_COUNT)
    ]  # fmt: skip
    tokens = [tuple(200 + 7 * i + j for j in range((3, 60, 5)[i])) for i in range(_COUNT)]
    return [Request(i, i, token_ids=tokens[i], params=how[i]) for i in range(_COUNT)]


@thorough
@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("drafter", ["model", "self", "ngram"])
def test_it_has_the_bits_of_a_cpu(
    pairs: list[Engine], drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token, draft and verdict, with a few fetches for many rounds."""
    waits, fetched = [], triton_decoder.fetched
    monkeypatch.setattr(triton_decoder, "fetched", lambda x: waits.append(1) or fetched(x))
    settings: dict[str, Any] = {"drafter": drafter, "draft_tokens": 2, "batch_size": 2}
    by_triton, by_c = (engine.with_settings(**settings) for engine in pairs)
    found, wanted = (said(engine, requests(temperature)) for engine in (by_triton, by_c))
    for each in found, wanted:  # an unverified request promises nothing
        del each[0]
    assert found == wanted
    rounds = max(r.round for _, _, _, _, _, records, _ in found.values() for r in records)
    statuses = {r.status for _, _, _, _, _, records, _ in found.values() for r in records}
    assert "accepted" in statuses
    assert statuses & {"bonus", "corrected"}
    assert len(waits) < 2 * rounds, "two for each, of one sequence alone, beside those for prompts and other sequences"
