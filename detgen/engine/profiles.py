"""What manifests and reports say of an engine's models and of the machine that they run on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers

from detgen.engine.config import EngineConfig
from detgen.machine import cpu_name
from detgen.passes import cuda_numerics
from detgen.passes.adapter import PlainDecoder
from detgen.passes.native_decoder import ARITHMETIC, NativeDecoder
from detgen.passes.preparing import Prepared


def numerics(prepared: Prepared, config: EngineConfig) -> dict[str, Any]:
    """As `Engine.profile`."""
    target, device = prepared.target, prepared.passes[0].device
    profile: dict[str, Any] = {
        "target": {"name": target.name, "digest": target.digest, "quant": config.target_quant},
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    model = prepared.passes[0].model
    if isinstance(model, NativeDecoder):  # the same bytes on any machine
        return {**profile, "arithmetic": ARITHMETIC}
    # The model's own forward says in which order functions are called.
    profile["versions"] = versions = {"transformers": transformers.__version__}
    census = model.census if isinstance(model, PlainDecoder) else None
    if census is not None and not census.proved:
        return {**profile, "arithmetic": ARITHMETIC}
    versions["torch"] = torch.__version__
    cpu = device.type == "cpu"
    profile |= {
        "device": cpu_name() if cpu else torch.cuda.get_device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability() if cpu else torch.version.cuda,
        **({} if cpu else {"cuda": cuda_numerics.described(device) | _computed_by(model, prepared)}),
        "attention": prepared.probe.attention,
    }
    if census is not None:
        return {**profile, "arithmetic": f"{ARITHMETIC} and torch", "operators": list(census.proved)}
    return {**profile, "arithmetic": "torch", "reference_rows": prepared.probe.reference_rows}


def _computed_by(model: Any, prepared: Prepared) -> dict[str, Any]:
    """Whose kernels run on CUDA, and in passes of how many rows."""
    kernels = getattr(model, "kernels", None)  # none where there is no Triton
    if kernels is None:
        return {"kernels": None, "linear": None, "rows": list(prepared.probe.rows)}
    linear = kernels.name if kernels.linear is kernels.own_linear else "vendor"
    return {"kernels": kernels.name, "linear": linear, "rows": list(prepared.probe.rows)}


def draft(prepared: Prepared, config: EngineConfig) -> dict[str, Any] | None:
    """As `Engine.draft_profile`."""
    d = prepared.draft
    return {"name": d.name, "digest": d.digest, "quant": config.draft_quant} if d else None


def probe(prepared: Prepared) -> dict[str, Any]:
    """As `Engine.probe_report`."""
    if prepared.thinking is None:
        return asdict(prepared.probe)
    thinker = prepared.thinking.thinker
    return asdict(prepared.probe) | {
        "thinker": asdict(thinker.writer.probe),
        "compressor": asdict(thinker.compressor.probe),
    }
