"""The lean decoder: what the model's own forward computes, from the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.linear import can_prepack
from detgen.passes.lean_decoder import lean_decoder

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: hf.LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama, stretched": lambda: hf.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=32),
}
ROWS = 12


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, traits: AttentionTraits) -> torch.Tensor:
    """Causal attention of one sequence that starts at position 0; a window as wide as it says."""
    group = q.shape[1] // k.shape[1]
    at = torch.arange(len(q))
    visible = at[:, None] >= at
    if traits.window is not None:
        visible &= at[:, None] - at < traits.window
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=traits.scale).transpose(0, 1).contiguous()


def random_model(config: Any) -> Any:
    """Every parameter random, the norms' weights and the biases, which start at one and zero, as well."""
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, p in model.named_parameters():
        p.add_(torch.randn_like(p) * (0.3 if "norm" in name or "bias" in name else 0.05))
    return model


IDS = torch.randint(0, 320, (ROWS,), generator=torch.Generator().manual_seed(1))


def own_logits(model: Any) -> torch.Tensor:
    """float32 [rows, vocabulary] by transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS[None], use_cache=False).logits[0].float()
    return logits


def lean_logits(model: Any, wanted: list[int]) -> torch.Tensor:
    """float32 [wanted rows, vocabulary] by the lean decoder; the model is used up."""
    scale = model.model.layers[0].self_attn.head_dim ** -0.5
    window = model.config.sliding_window if isinstance(model, hf.MistralForCausalLM) else None
    lean = lean_decoder(model, attend, [AttentionTraits(scale, window)] * 3)
    assert lean is not None
    with torch.inference_mode():
        logits: torch.Tensor = lean(IDS, torch.arange(ROWS), torch.tensor(wanted)).float()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_models_own_forward(family: str) -> None:
    """Logits of the wanted rows, in their order, as transformers computes them, to rounding."""
    model = random_model(FAMILIES[family]())
    want = own_logits(model)
    wanted = [0, 4, 5, ROWS - 1]
    found = lean_logits(model, wanted)
    assert found.shape == (4, 320)
    assert (found - want[wanted]).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.skipif(not can_prepack(torch.zeros(8, 8, dtype=torch.bfloat16)), reason="no bfloat16 in oneDNN here")
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_less_exact_than_the_models_own(family: str) -> None:
    """Both round; the lean decoder's logits are as near to those of the same weights in float32."""
    model = random_model(FAMILIES[family]()).to(torch.bfloat16)
    exact = own_logits(copy.deepcopy(model).float())
    own = (own_logits(model) - exact).square().mean()
    lean = (lean_logits(model, list(range(ROWS))) - exact).square().mean()
    assert 0 < lean < 1.1 * own


def test_the_model_is_let_go() -> None:
    """Neither layers nor an output layer of its own stay in memory twice."""
    model = random_model(FAMILIES["mistral"]())
    before = sum(p.numel() for p in model.parameters())
    assert lean_decoder(model, attend, [AttentionTraits(0.25)] * 3) is not None
    assert sum(p.numel() for p in model.parameters()) < before / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.layers[1].mlp.to(torch.bfloat16),
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.GELU()),
        lambda m: setattr(m.model.layers[2].self_attn, "o_proj", torch.nn.Sequential(torch.nn.Linear(64, 64))),
        lambda m: setattr(m, "lm_head", torch.nn.Sequential(torch.nn.Linear(64, 320))),
        lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"),
        lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq[:4]),
    ],
    ids=[
        "two dtypes",
        "another activation",
        "another linear",
        "another head",
        "changing frequencies",
        "part of a head turned",
    ],
)
def test_other_models_are_left_as_they_are(change: Callable[[Any], Any]) -> None:
    """A model with any part that the lean decoder does not know runs by its own forward, unchanged."""
    model = random_model(FAMILIES["llama, tied"]())
    change(model)
    parts = copy.copy(dict(model.named_modules()))
    assert lean_decoder(model, attend, [AttentionTraits(0.25)] * 3) is None
    assert dict(model.named_modules()) == parts
