"""Small thinking models with random weights, which think never, always, or about some of their chunks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from detgen.thinking import register
from detgen.thinking.configuration import ThinkingStatesConfig
from detgen.thinking.modeling import ThinkingStatesForCausalLM

HIDDEN = 64
END = 0  # of a text, and of a thought
Thinks = Literal["never", "sometimes", "always"]

BACKBONE: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 4096,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 48,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": END,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def random_model(
    thinks: Thinks = "sometimes", seed: int = 0, backbone: dict[str, Any] | None = None, **settings: Any
) -> ThinkingStatesForCausalLM:
    """A model with random weights.

    Args:
        thinks: about which chunks.
        seed: of the weights.
        backbone: settings of the backbone that are not those above.
        settings: others of the configuration.
    """
    register()
    torch.manual_seed(seed)
    config = ThinkingStatesConfig(backbone={**BACKBONE, **(backbone or {})}, **{"max_thought_tokens": 5, **settings})
    model = ThinkingStatesForCausalLM(config).eval()
    head = model.thinker.head.weight.data
    # The end has the lowest id, so that it wins where all are equal.
    if thinks == "never":
        head.zero_()
    else:
        head[END] *= 0.0 if thinks == "always" else 12.0
    return model


def save_model(folder: Path, model: ThinkingStatesForCausalLM, tokenizer: Path) -> Path:
    """Save a model with the tokenizer of another folder; returns the folder."""
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return folder
