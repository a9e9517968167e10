"""Models as the peers take them: in memory for detgen, on the device and in one number format for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import LLAMA
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig

from detgen.bench.config import BenchConfig
from detgen.bench.model_source import loaded, own_forward, resolve
from detgen.bench.peer_interface import ModelSource
from detgen.bench.random_weights import CONFIGS
from detgen.engine.config import EngineConfig
from detgen.errors import BenchError
from detgen.progress import Unobserved

IDS = torch.arange(5, 25)[None]


@pytest.fixture
def embedded(source: ModelSource) -> ModelSource:
    return replace(source, random_weights=None, engine=replace(source.engine, dtype="bfloat16"))


def test_transformers_runs_its_model_in_the_number_format_of_the_benchmark(
    embedded: ModelSource, demo_models: Any
) -> None:
    model = own_forward(embedded, "target")
    with torch.inference_mode():
        found = model(IDS).logits
        wanted = AutoModelForCausalLM.from_pretrained(demo_models.target, dtype=torch.bfloat16)(IDS).logits
    assert torch.equal(found, wanted)


def test_weights_in_few_bits_are_widened_to_that_format(embedded: ModelSource) -> None:
    source = replace(embedded, engine=replace(embedded.engine, target_quant="nf4"))
    model, plain = own_forward(source, "target"), own_forward(embedded, "target")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        found, wanted = model(IDS).logits, plain(IDS).logits
    assert found.isfinite().all()
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", None])
def test_random_weights_are_those_of_a_checkpoint_in_the_number_format_of_its_configuration(
    source: ModelSource, tmp_path: Path, stored: str | None
) -> None:
    settings = CONFIGS["tiny"] | ({} if stored is None else {"dtype": stored})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    wanted = replace(source, random_weights=str(tmp_path), as_stored=True)
    for role in ("target", "draft"):
        kept, widened = loaded(wanted, role, as_stored=True).model, own_forward(wanted, role)
        assert {p.dtype for p in kept.parameters()} == {getattr(torch, stored or "float32")}
        for own, theirs in zip(kept.parameters(), widened.parameters(), strict=True):
            assert theirs.dtype == torch.float32
            assert torch.equal(own.float(), theirs)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_only_what_transformers_runs_is_taken_to_the_device(embedded: ModelSource, role: str) -> None:
    """The device is torch's `meta` here, which every machine has."""
    elsewhere = replace(embedded, engine=replace(embedded.engine, device="meta"))
    assert own_forward(elsewhere, role).device.type == "meta"
    assert loaded(elsewhere, role).whole().device.type == "cpu"


def test_rules_of_tensor_cores_are_not_compared() -> None:
    with pytest.raises(BenchError, match="no other program computes in bfloat16-tc24: compare them with --dtype bfl"):
        resolve(BenchConfig(EngineConfig(dtype="bfloat16-tc24")), Unobserved())


def test_experts_are_not_all_read(random_model: Callable[..., Path]) -> None:
    """By the passes of a mixture: how many weights they read is not known."""
    mixture, plain = (random_model(config(**LLAMA)) for config in (MixtralConfig, LlamaConfig))
    assert resolve(BenchConfig(EngineConfig(target=str(mixture))), Unobserved()).weights is None
    known = resolve(BenchConfig(EngineConfig(target=str(plain))), Unobserved())
    assert known.weights
    assert known.native


def test_weights_that_are_stored_in_few_bits_are_not_quantized_again(random_model: Callable[..., Path]) -> None:
    """So there are neither rows in q8 nor a copy that drafts."""
    folder = random_model(GptOssConfig(**LLAMA, num_local_experts=4))
    settings = json.loads((folder / "config.json").read_text())
    assert resolve(BenchConfig(EngineConfig(target=str(folder))), Unobserved()).native
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert not resolve(BenchConfig(EngineConfig(target=str(folder))), Unobserved()).native
