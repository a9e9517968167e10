"""Model configurations to fill with random weights: the speed of a size without its download.

The draft model of such a target has its vocabulary, half its width and a quarter of its layers; that of llama-3.1-8b is
llama-3.2-1b. It never agrees with the target; it only costs what a draft model costs.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from detgen.errors import BenchError

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "llama-3.2-1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "qwen3-0.6b": {"model_type": "qwen3", "vocab_size": 151936, "rope_theta": 1000000.0}
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "max_position_embeddings": 40960}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    # 29.4 million parameters, 4.2 million of them in the embedding.
    "llama-29m": {"model_type": "llama", "vocab_size": 8192, "max_position_embeddings": 8192}
    | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    # 88.9 million parameters, 6.3 million of them in the embedding.
    "llama-89m": {"model_type": "llama", "vocab_size": 8192, "max_position_embeddings": 8192}
    | {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True},
    # 134.5 million parameters, 28.3 million of them in the embedding: the shapes of SmolLM2-135M.
    "llama-135m": {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192}
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "rope_theta": 100000.0}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen2.5-0.5b": {"model_type": "qwen2", "vocab_size": 151936, "rope_theta": 1000000.0}
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "max_position_embeddings": 32768}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "tiny": {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 2048}
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a built-in configuration or of a config.json.

    Raises:
        BenchError: if there is neither.
    """
    if name in CONFIGS:
        return dict(CONFIGS[name])
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(CONFIGS)
        raise BenchError(
            f"there is no configuration {name!r}; choose {known}, or give the path of a config.json"
        ) from None
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise BenchError(f"{path} has no model_type; give the config.json of a transformers model")
    return settings


def draft_settings(name: str) -> dict[str, Any]:
    """Return the settings of the draft model for a configuration."""
    if name == "llama-3.1-8b":
        return dict(CONFIGS["llama-3.2-1b"])
    settings = settings_of(name)
    heads = settings["num_attention_heads"]
    smaller = settings | {
        "num_hidden_layers": max(settings["num_hidden_layers"] // 4, 1),
        "hidden_size": settings["hidden_size"] // 2,
        "intermediate_size": settings["intermediate_size"] // 2,
        "num_attention_heads": max(heads // 2, 1),
        "num_key_value_heads": max(settings.get("num_key_value_heads", heads) // 2, 1),
    }
    smaller.pop("layer_types", None)
    return smaller


def config_of(name: str, role: str) -> Any:
    """Return the transformers configuration of a target or of its draft model.

    Raises:
        BenchError: if there is no configuration of this name.
    """
    from transformers import AutoConfig

    settings = copy.deepcopy(settings_of(name) if role == "target" else draft_settings(name))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def random_model(name: str, role: str, dtype: Any | None, device: Any, seed: int) -> Any:
    """Return a transformers decoder with random weights; the same seed gives the same ones on the same device.

    Weights are drawn so that attention and the layers after it influence the logits: as transformers initialises them,
    such a model repeats one token forever, which would flatter look-up drafters. They are rounded to the number format
    in which the configuration says that its checkpoint is stored, if it does.

    Args:
        name: name of the configuration.
        role: target or draft.
        dtype: torch dtype of the weights that are returned; None for those of the configuration, or float32.
        device: torch device, on which they are made.
        seed: seed of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(name, role)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    stored = getattr(config.get_text_config(), "dtype", None) or config.dtype or dtype or torch.float32
    with torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=stored, trust_remote_code=False)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.normal_(std=1.5 * p.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    if dtype is not None:
        model = model.to(dtype)
    return model.eval().requires_grad_(False)
