"""What manifests and reports say of an engine's models and of the machine that they run on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers

from detgen.engine.config import EngineConfig
from detgen.machine import cpu_name
from detgen.passes.native_decoder import ARITHMETIC, NativeDecoder
from detgen.passes.preparing import Prepared


def numerics(prepared: Prepared, config: EngineConfig) -> dict[str, Any]:
    """As `Engine.profile`."""
    target, device = prepared.target, prepared.passes[0].device
    profile = {
        "target": {"name": target.name, "digest": target.digest, "quant": config.target_quant},
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    if isinstance(prepared.passes[0].model, NativeDecoder):  # the same bytes on any machine
        return {**profile, "arithmetic": ARITHMETIC}
    cpu = device.type == "cpu"
    return {
        **profile,
        "arithmetic": "torch",
        "device": cpu_name() if cpu else torch.cuda.get_device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability() if cpu else torch.version.cuda,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "attention": prepared.probe.attention,
    }


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
