"""Temperature tuning of attention (Nakanishi, arXiv 2501.19399): queries grow with the logarithm of their position."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from detgen.program.fdlibm import logarithm


class Tuning(NamedTuple):
    """Queries are multiplied by 1 + by * log(1 + floor((position + offset) / every)).

    Attributes:
        every: positions.
        by: see there.
        offset: likewise.
    """

    every: float
    by: float
    offset: int

    def factors(self, positions: int) -> np.ndarray:
        """Those of the first positions, float32 [positions], each rounded once."""
        steps = np.floor((np.arange(positions, dtype=np.float64) + self.offset) / self.every)
        found: np.ndarray = (1 + self.by * logarithm(1 + steps)).astype(np.float32)
        return found


def tuning_of(attention: Any, config: Any) -> Tuning | None:
    """That of a module of transformers, of a model with a configuration; None for none."""
    if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:  # Llama 4's
        return Tuning(float(attention.floor_scale), float(attention.attn_scale), 1)
    if type(attention).__name__ in ("Ministral3Attention", "Mistral4Attention"):
        settings = config.rope_parameters
        return Tuning(float(settings["original_max_position_embeddings"]), float(settings["llama_4_scaling_beta"]), 0)
    return None
