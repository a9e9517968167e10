"""A model's configuration and tokenizer, and the limits and ends of sequences that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detgen import thinking
from detgen.errors import EngineError
from detgen.models.explained import explained
from detgen.models.wrappers import settings_of_text


def load_settings(folder: Path, name: str, *, trusted: bool) -> tuple[Any, Any]:
    """Load the configuration and tokenizer from a folder that `check_folder` has checked.

    Raises:
        EngineError: as for `load_model`.
    """
    from transformers import AutoConfig, AutoTokenizer

    thinking.register()
    with explained(name, "config.json"):
        config = settings_of_text(AutoConfig.from_pretrained(folder, trust_remote_code=trusted))
    tokens = next((f for f in ("tokenizer.json", "tokenizer_config.json") if (folder / f).exists()), None)
    if tokens is None and not any((folder / f).exists() for f in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise EngineError(f"cannot load the tokenizer of {name}: put its tokenizer.json next to config.json")
    with explained(name, tokens):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    return config, tokenizer


def context_of(config: Any) -> int:
    """Return the most positions that a sequence may have.

    Some rotary embeddings change their frequencies when a pass has a position beyond the original context, which would
    make a row depend on its neighbours' positions: such models are limited to that context.
    """
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    context = int(next((n for name in names if (n := getattr(config, name, 0))), 2048))
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(r for r in rope.values() if isinstance(r, dict))):
        if settings.get("rope_type") in ("dynamic", "longrope"):
            original = settings.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            context = min(context, int(original or context))
    return context


def ends_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation settings and the tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(int(i) for i in ids)
    return frozenset(found)
