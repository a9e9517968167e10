"""What manifests and reports say of an engine's models and of the machine that they run on."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import transformers

from detgen.engine.config import EngineConfig
from detgen.machine import cpu_name
from detgen.passes.adapter import PlainDecoder
from detgen.passes.native_decoder import ARITHMETIC, NativeDecoder
from detgen.passes.preparing import Prepared


def numerics(prepared: Prepared, config: EngineConfig) -> dict[str, Any]:
    """As `Engine.profile`."""
    target, device = prepared.target, prepared.passes[0].device
    profile: dict[str, Any] = {
        "target": {"name": target.name, "digest": target.digest, "quant": config.target_quant},
        "dtype": str(target.rounded or target.dtype).removeprefix("torch."),
    }
    model = prepared.passes[0].model
    if isinstance(model, NativeDecoder):  # the same bytes on any machine
        return {**profile, "arithmetic": ARITHMETIC}
    if device.type == "cuda":  # these bytes, too, but no GPU has shown it yet
        return {
            **profile,
            "arithmetic": ARITHMETIC,
            "device": torch.cuda.get_device_name(device),
            "cuda": _cuda(device),
        }
    # The model's own forward says in which order functions are called.
    profile["versions"] = versions = {"transformers": transformers.__version__}
    assert isinstance(model, PlainDecoder)
    proved = model.census.proved if model.census else ()
    if not proved:
        return {**profile, "arithmetic": ARITHMETIC}
    versions["torch"] = torch.__version__
    profile |= {"device": cpu_name(), "capability": torch.backends.cpu.get_cpu_capability()}
    return {**profile, "arithmetic": f"{ARITHMETIC} and torch", "operators": list(proved)}


def _cuda(device: torch.device) -> dict[str, Any]:
    """What makes programs of kernels, and runs them."""
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return {"capability": capability, "toolkit": torch.version.cuda, "triton": version("triton")}


def draft(prepared: Prepared, config: EngineConfig) -> dict[str, Any] | None:
    """As `Engine.draft_profile`."""
    d = prepared.draft
    return {"name": d.name, "digest": d.digest, "quant": config.draft_quant} if d else None
