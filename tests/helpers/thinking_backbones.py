"""Tiny backbones of every kind that a thinking model may have, and texts for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.4,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
BACKBONES = {
    "llama": lambda **changed: LlamaConfig(**{**SIZES, **changed}),
    "mistral": lambda **changed: MistralConfig(**{**SIZES, "sliding_window": 6, **changed}),
    "qwen2": lambda **changed: Qwen2Config(**{**SIZES, **WINDOWED, **changed}),
    "qwen3": lambda **changed: Qwen3Config(**{**SIZES, **WINDOWED, **changed}),
}


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
