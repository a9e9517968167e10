"""Folders with adapters, as PEFT writes them, and what merging one gives in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from detgen.program.arrays import Array, array, tensor

PREFIX = "base_model.model."


def factors(shapes: Mapping[str, Sequence[int]], rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of an adapter, by their names in its file.

    Args:
        shapes: [outputs, inputs] of modules, by their names.
        rank: of all.
        seed: of the numbers.
    """
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, (outputs, inputs) in shapes.items():
        made[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=g) * 0.1
        made[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=g) * 0.1
    return made


def write(folder: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    """A folder with an adapter of these tensors and settings."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": None, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merged(
    weight: Array, tensors: Mapping[str, torch.Tensor], name: str, scale: float, *, turned: bool = False
) -> np.ndarray:
    """float64, `W + scale * B @ A`, as PEFT's `LoraLayer.get_delta_weight` has it; transposed where W is turned."""
    up, down = (tensors[f"{PREFIX}{name}.lora_{part}.weight"].double() for part in "BA")
    change = scale * (up @ down)
    return array(tensor(weight).double() + (change.t() if turned else change))
