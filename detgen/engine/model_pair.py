"""Loads the models of an engine, checks that they fit together, and describes them for manifests and reports."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_adapted, uses_draft
from detgen.errors import DEMO, QuantName
from detgen.machine import cpu_name
from detgen.models.bitsandbytes_weights import QUANTS
from detgen.models.fitting import check_vocabularies
from detgen.models.loaded import DTYPES, LoadedModel, Role
from detgen.models.loading import load_model
from detgen.models.memory import check_room
from detgen.program.arrays import BFLOAT16, FLOAT32
from detgen.progress import Observer
from detgen.runner.preparing import Prepared

_ROOM = 512  # MiB that transformers and small models take


def load_models(config: EngineConfig, observer: Observer) -> tuple[LoadedModel, LoadedModel | None]:
    """Load the target, and the draft model if there is one and the drafter uses it.

    Raises:
        EngineError: if a model cannot be loaded, the draft model is missing, or the two do not share a vocabulary.
    """

    def load(
        source: str | Path | LoadedModel | None, role: Role, quant: QuantName, adapter: str | Path | None = None
    ) -> LoadedModel:
        if source is not None and not isinstance(source, str | Path):
            return source  # already loaded
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
    """Return the number format of the KV cache: the one asked for, or that of the inputs of linear layers."""
    rounded = BFLOAT16 if target.rounded == BFLOAT16 else FLOAT32
    return DTYPES.get(config.kv_dtype, rounded)


def numerics(prepared: Prepared, config: EngineConfig) -> dict[str, Any]:
    """See `Engine.profile`."""
    target = prepared.target
    merged = (
        {}
        if target.adapter is None
        else {"adapter": target.adapter, "adapter_dtype": (target.adapter_dtype or FLOAT32).name}
    )
    profile: dict[str, Any] = {
        "target": {"name": target.name, "digest": target.digest, "quant": config.target_quant, **merged},
        "dtype": "float32" if target.rounded is None else target.dtype,
        "kv_dtype": prepared.kv_dtype.name,
        **prepared.runners[0].decoder.profile(),
    }
    if "operators" in profile:  # torch's kernels for them depend on the processor
        import torch

        profile |= {"device": cpu_name(), "capability": torch.backends.cpu.get_cpu_capability()}
    if config.target_quant in QUANTS:  # its quantizer decides the weights
        profile["versions"] = {**profile.get("versions", {}), "bitsandbytes": version("bitsandbytes")}
    return profile
