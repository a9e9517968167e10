"""Loads the models of an engine and checks that they fit together."""

from __future__ import annotations

from pathlib import Path

import torch

from detgen.drafters.registry import DRAFTERS
from detgen.engine.config import EngineConfig
from detgen.errors import DEMO, EngineError, QuantName
from detgen.passes.loading import LoadedModel, check_vocabularies, load_model


def load_models(config: EngineConfig, device: torch.device) -> tuple[LoadedModel, LoadedModel | None]:
    """The target, and the draft model if there is one and the drafter uses it.

    Raises:
        EngineError: if a model cannot be loaded, the draft model is missing, or the two do not share a vocabulary.
    """

    def load(source: str | Path | LoadedModel | None, role: str, quant: QuantName) -> LoadedModel:
        if isinstance(source, LoadedModel):
            return source
        return load_model(source or DEMO / role, str(source or f"embedded:{role}"), device, config.dtype, quant)

    use = DRAFTERS[config.drafter].draft_model if isinstance(config.drafter, str) else "optional"
    available = config.draft is not None or config.target is None
    if use == "required" and not available:
        raise EngineError(
            f"--drafter {config.drafter} needs a draft model: give one with --draft, or use --drafter ngram"
        )
    target = load(config.target, "target", config.target_quant)
    if use == "unused" or not available:
        return target, None
    draft = load(config.draft, "draft", config.draft_quant)
    check_vocabularies(target, draft)
    return target, draft
