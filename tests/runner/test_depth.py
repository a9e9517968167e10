"""Packed rows are compared with the model's own forward deep in a sequence, whatever its windows are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import transformers as hf
from helpers import windowed
from helpers.small_models import SIZES, made

from detgen import EngineError
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.generic.generic_decoder import Census
from detgen.models.families import FAMILIES
from detgen.models.loading import LoadedModel
from detgen.runner import census, own_forward
from detgen.runner.deep_forward import depth_of

LONG = {**SIZES, "max_position_embeddings": 20_000}


def seeing(change: Callable[[AttentionTraits], AttentionTraits], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes have other traits than those that were asked for."""
    attach = own_forward.attach

    def other(*args: Any) -> Any:
        layout = attach(*args)
        return replace(layout, traits=[change(traits) for traits in layout.traits])

    monkeypatch.setattr(own_forward, "attach", other)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (hf.MistralConfig(**LONG, sliding_window=100), lambda t: replace(t, window=None)),
        (hf.MistralConfig(**LONG, sliding_window=5000), lambda t: replace(t, window=None)),
        (hf.MistralConfig(**LONG, sliding_window=5000), lambda t: replace(t, window=None, chunk=5000)),
        (hf.MistralConfig(**LONG, sliding_window=500), lambda t: replace(t, window=300)),
        (hf.LlamaConfig(**LONG), lambda t: replace(t, window=64)),
        (hf.LlamaConfig(**LONG), lambda t: replace(t, chunk=64)),
        (hf.LlamaConfig(**SIZES), lambda t: replace(t, window=200)),
    ],
)
def test_other_windows_are_found(
    config: Any, change: Callable[[AttentionTraits], AttentionTraits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these are right below the window."""
    windowed.prepared(made(config), 10_000)
    seeing(change, monkeypatch)
    with pytest.raises(EngineError, match=r"ForCausalLM is not supported: packed rows at position [\d,]+ give other"):
        windowed.prepared(made(config), 10_000)


def test_scales_by_the_place_in_a_pass_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 scales queries of some layers by how many rows are before them in the pass, not by their positions."""
    monkeypatch.setattr(census, "take_census", lambda *_: Census((), ""))  # which finds it, too
    monkeypatch.delitem(FAMILIES, "Llama4ForCausalLM")  # whose steps have the factors of positions
    settings = {**SIZES, "head_dim": 16, "intermediate_size_mlp": 96, "moe_layers": [], "no_rope_layers": [1, 0]}
    for tuned in (False, True):
        config = hf.Llama4TextConfig(
            **settings, attention_chunk_size=100, attn_temperature_tuning=tuned, floor_scale=128, attn_scale=1.0
        )
        if not tuned:
            windowed.prepared(made(config))
            continue
        with pytest.raises(EngineError, match=r"Llama4ForCausalLM is not supported: packed rows at position"):
            windowed.prepared(made(config))


def depth(config: Any, context: int) -> int | None:
    """Where the first row of the comparison is."""
    model = made(config)
    layout = own_forward.attach(model, "it")
    found = depth_of(LoadedModel("it", model, None, "", context, frozenset()), model, layout)
    return None if found is None else found.at


@pytest.mark.parametrize(
    ("config", "context", "at"),
    [
        (hf.LlamaConfig(**LONG), 20_000, 442),  # behind the vocabulary of 300
        (hf.LlamaConfig(**LONG), 64, None),
        (hf.LlamaConfig(**LONG), 100, 92),
        (hf.MistralConfig(**LONG, sliding_window=1000), 20_000, 1492),
        (hf.MistralConfig(**LONG, sliding_window=15_000), 20_000, 16_376),
        (hf.LlamaConfig(**LONG, head_dim=16, pretraining_tp=8192), 20_000, 12_280),
    ],
)
def test_how_deep(config: Any, context: int, at: int | None) -> None:
    """Behind all numbers of the configuration that can be windows, as far as sequences and the time reach."""
    assert depth(config, context) == at


def test_latent_attention_is_not_compared() -> None:
    """Its cache holds what keys and values are made of."""
    settings = {**SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 20}
    config = hf.DeepseekV3Config(**settings, **sizes, topk_group=1, moe_intermediate_size=32, n_shared_experts=1)
    assert depth(config, 512) is None
    windowed.prepared(made(config))
