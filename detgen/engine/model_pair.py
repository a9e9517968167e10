"""Loads the models of an engine and checks that they fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_adapted, uses_draft
from detgen.errors import DEMO, QuantName
from detgen.models.fitting import check_vocabularies
from detgen.models.loading import DTYPES, LoadedModel, Role, load_model
from detgen.models.memory import check_room
from detgen.program.arrays import BFLOAT16, FLOAT32
from detgen.progress import Observer

_ROOM = 512  # MiB that transformers and small models take


def load_models(config: EngineConfig, observer: Observer) -> tuple[LoadedModel, LoadedModel | None]:
    """The target, and the draft model if there is one and the drafter uses it.

    Raises:
        EngineError: if a model cannot be loaded, the draft model is missing, or the two do not share a vocabulary.
    """

    def load(
        source: str | Path | LoadedModel | None, role: Role, quant: QuantName, adapter: str | Path | None = None
    ) -> LoadedModel:
        if source is not None and not isinstance(source, str | Path):
            return source  # loaded already
        place, name, trusted = source or DEMO / role, str(source or f"embedded:{role}"), config.trust_remote_code
        return load_model(
            *(place, name, config.dtype, quant), trusted=trusted, observer=observer, role=role, adapter=adapter
        )

    check_room(_ROOM, "load a model")
    check_adapted(config)
    target = load(config.target, "target", config.target_quant, config.adapter)
    if not uses_draft(config):
        return target, None
    draft = load(config.draft, "draft", config.draft_quant)
    check_vocabularies(target, draft)
    return target, draft


def kv_dtype(config: EngineConfig, target: LoadedModel) -> np.dtype[Any]:
    """The number format of keys and values: what is asked for, else that of the inputs of linear layers."""
    rounded = BFLOAT16 if target.rounded == BFLOAT16 else FLOAT32
    return DTYPES.get(config.kv_dtype, rounded)
