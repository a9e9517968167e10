"""Packed rows are compared with the model's own forward deep in a sequence, whatever its windows are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers import windowed
from helpers.small_models import SIZES, made

from detgen import EngineError
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.generic.generic_decoder import Census
from detgen.models.families import FAMILIES
from detgen.models.loaded import LoadedModel
from detgen.models.rotary import Tuning
from detgen.runner import census, deep_forward, own_forward
from detgen.runner.deep_forward import depth_of

LONG = {**SIZES, "max_position_embeddings": 20_000}
LLAMA4: dict[str, Any] = {
    **{"head_dim": 16, "intermediate_size_mlp": 96, "moe_layers": [], "no_rope_layers": [1, 0]},
    "attn_temperature_tuning": True,
}


def seeing(change: Callable[[AttentionTraits], AttentionTraits], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes have other traits than those that were asked for."""
    attach = own_forward.attach

    def other(*args: Any) -> Any:
        layout = attach(*args)
        return replace(layout, traits=[change(traits) for traits in layout.traits])

    monkeypatch.setattr(own_forward, "attach", other)


def test_pages_are_made_up_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of the two passes: that takes as long as the passes of a small model."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr("detgen.runner.depth.entries", lambda shape: found.append(shape) or deep_forward.entries(shape))
    windowed.prepared(made(hf.LlamaConfig(**SIZES)), 1000)
    assert SIZES["num_hidden_layers"] > 1
    assert len(found) == 2


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
    for tuned in (False, True):
        settings = {**SIZES, **LLAMA4, "attn_temperature_tuning": tuned}
        config = hf.Llama4TextConfig(**settings, attention_chunk_size=100, floor_scale=128, attn_scale=1.0)
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
        (hf.MistralConfig(**LONG, sliding_window=15_000), 20_000, 19_992),
        (hf.LlamaConfig(**LONG, head_dim=16, pretraining_tp=8192), 20_000, 12_280),
    ],
)
def test_how_deep(config: Any, context: int, at: int | None) -> None:
    """Behind all numbers of the configuration that can be windows, as far as sequences and the time reach."""
    assert depth(config, context) == at


LATENT = hf.DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 20, "first_k_dense_replace": 2},
)
NETS = hf.Qwen3_5TextConfig(
    **SIZES,
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 12},
    **{"linear_num_value_heads": 2, "linear_value_head_dim": 16, "head_dim": 16},
)


@pytest.mark.parametrize("config", [LATENT, NETS])
def test_nothing_is_made_up(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latent attention's cache, and of states: the rows stand behind a text that is longer than the first one."""
    assert depth(config, 512) == 0
    windowed.prepared(made(config))
    seeing(lambda t: t and replace(t, window=100), monkeypatch)
    with pytest.raises(EngineError, match=r"ForCausalLM is not supported: packed rows at position 150 give other"):
        windowed.prepared(made(config))


def test_states_alone() -> None:
    """Layers without keys and values, all of them."""
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8}
    config = hf.Mamba2Config(**sizes, head_dim=16, state_size=12, n_groups=2, chunk_size=16, pad_token_id=0)
    assert depth(config, 512) == 0
    windowed.prepared(made(config))


def test_keys_that_are_cached_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf.FalconConfig(
        **{"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2},
        new_decoder_architecture=True,
    )
    assert depth(config, 512) == 442
    windowed.prepared(made(config))
    seeing(lambda t: replace(t, window=300), monkeypatch)
    with pytest.raises(EngineError, match=r"FalconForCausalLM is not supported: packed rows at position 442 give"):
        windowed.prepared(made(config))


@pytest.mark.parametrize(
    ("config", "at"),
    [
        (hf.Ministral3Config(**LONG, head_dim=16, sliding_window=None), 16_380),
        (hf.Ministral3Config(**LONG, head_dim=16, sliding_window=500), 16_380),
        (hf.Llama4TextConfig(**LONG, **LLAMA4, attention_chunk_size=5000, floor_scale=8192), 9996),
        (hf.Llama4TextConfig(**LONG, **LLAMA4, attention_chunk_size=8192, floor_scale=8192), 8188),
        (hf.Llama4TextConfig(**LONG, **LLAMA4, attention_chunk_size=100, floor_scale=8192), 8196),
    ],
)
def test_queries_that_do_not_grow_are_found(config: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far from the first position they would begin to, and however large the model is."""

    def model() -> Any:
        found = made(config)
        for name, parameter in found.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.data *= 10
        return found

    monkeypatch.setattr(deep_forward, "_ENTRIES", 0)
    assert depth(config, 20_000) == at
    windowed.prepared(model(), 20_000)
    monkeypatch.setattr(Tuning, "factors", lambda _, positions: np.ones(positions, np.float32))
    with pytest.raises(EngineError, match=rf"ForCausalLM is not supported: packed rows at position {at:,} give other"):
        windowed.prepared(model(), 20_000)
