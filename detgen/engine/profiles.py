"""What manifests and reports say of an engine's models and of the machine that they run on."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.machine import cpu_name
from detgen.models.bitsandbytes_weights import QUANTS
from detgen.program.arrays import FLOAT32
from detgen.runner.preparing import Prepared


def numerics(prepared: Prepared, config: EngineConfig) -> dict[str, Any]:
    """As `Engine.profile`."""
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


def draft(prepared: Prepared, config: EngineConfig) -> dict[str, Any] | None:
    """As `Engine.draft_profile`."""
    d = prepared.draft
    return {"name": d.name, "digest": d.digest, "quant": config.draft_quant} if d else None
