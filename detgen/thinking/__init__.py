"""Thinking States models (Amos et al., arXiv 2602.08332) for transformers: decoders that think while they read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from detgen.thinking.modeling import ThinkingStatesForCausalLM


def register() -> None:
    """Register these models with transformers' `AutoConfig` and `AutoModelForCausalLM`; may be called repeatedly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from detgen.thinking.configuration import ThinkingStatesConfig
    from detgen.thinking.modeling import ThinkingStatesForCausalLM

    AutoConfig.register(ThinkingStatesConfig.model_type, ThinkingStatesConfig, exist_ok=True)
    AutoModelForCausalLM.register(ThinkingStatesConfig, ThinkingStatesForCausalLM, exist_ok=True)


def thinks(model: Any) -> TypeGuard[ThinkingStatesForCausalLM]:
    """Return whether a model is one of these. Imports nothing: while their module is not imported, there are none."""
    modeling = sys.modules.get("detgen.thinking.modeling")
    return modeling is not None and isinstance(model, modeling.ThinkingStatesForCausalLM)


def remedy(weight: str, *, missing: bool) -> str:
    """Return what to do about a weight that is missing or has a wrong shape; "" unless it is part of T or C."""
    name = weight.partition(".")[0]
    part = {"thinker": "T (thinker)", "compressor": "C (compressor)"}.get(name)
    if part is None:
        return ""
    wrong = f"the folder has no {part}, or not all of it" if missing else f"{part} must be as wide as the backbone"
    return f"; {wrong}: train the backbone, T and C together, as tools/train_thinking_states.py does"
