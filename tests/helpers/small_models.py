"""Models of few and small layers with random weights, as transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Of those that are saved beside the embedded tokenizer, and loaded.
STORED = SIZES | {"vocab_size": 4096, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 0}


def made(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose norms and biases have a say."""
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model
