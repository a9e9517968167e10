"""Models of families that LongRoPE may stretch, as llama.cpp's converter makes files of them, for tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import transformers as hf

from helpers.families import LATENT
from helpers.gguf_models import Model
from helpers.small_models import STORED

SIZES: dict[str, Any] = {**STORED, "num_hidden_layers": 3}
SHORT, LONG = [1.1] * 4 + [1.5] * 4, [4.0] * 8
STRETCHED: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128},
    **{"short_factor": SHORT, "long_factor": LONG},
}
PART: dict[str, Any] = STRETCHED | {"short_factor": SHORT[1:7], "long_factor": LONG[:6], "partial_rotary_factor": 0.75}
AMPLITUDES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
USUAL = math.sqrt(1 + math.log(2) / math.log(128))
WHOLE = STRETCHED | {"original_max_position_embeddings": 256}
SCALED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.8, "attention_multiplier": 0.25, "logits_scaling": 4.0}
LEFT: dict[str, Any] = {"vocab_size": None}
PHI = LEFT | {"rope.dimension_count": 16, "attention.sliding_window": 0}
LATENT_SAID = LEFT | {
    "attention.key_length": LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"],
    "attention.value_length": None,
    "rope.dimension_count": LATENT["qk_rope_head_dim"],
    "rope.freq_base": None,
}


def factors(short: list[float], long: list[float]) -> dict[str, np.ndarray]:
    both = {"short": short, "long": long}
    return {f"rope_factors_{reach}.weight": np.array(numbers, np.float32) for reach, numbers in both.items()}


MODELS = {
    "phi2": Model(
        "phi2",
        lambda: hf.PhiConfig(
            **{**SIZES, "intermediate_size": 4 * SIZES["hidden_size"]},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        ),
        LEFT | {"rope.dimension_count": 6, "rope.freq_base": None},
    ),
    "phi3": Model(
        "phi3",
        lambda: hf.Phi3Config(**SIZES, sliding_window=40),
        PHI | {"attention.sliding_window": 40, "rope.scaling.original_context_length": 4096},
    ),
    "phi3_long": Model(
        "phi3",
        lambda: hf.Phi3Config(**SIZES, original_max_position_embeddings=128, rope_parameters=dict(STRETCHED)),
        PHI | {"rope.scaling.attn_factor": USUAL},
        more=factors(SHORT, LONG),
    ),
    "phi4_mini": Model(
        "phi3",
        lambda: hf.Phi3Config(
            **{**SIZES, "tie_word_embeddings": True, "original_max_position_embeddings": 128},
            rope_parameters={**PART, "attention_factor": 1.3},
        ),
        PHI | {"rope.dimension_count": 12, "rope.scaling.attn_factor": 1.3},
        more=factors(PART["short_factor"], PART["long_factor"]),
    ),
    "phimoe": Model(
        "phimoe",
        lambda: hf.PhimoeConfig(
            **{**SIZES, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 40},
            rope_parameters=STRETCHED | AMPLITUDES,
        ),
        PHI | {"attention.sliding_window": 40, "rope.scaling.attn_factor": USUAL},
        more=factors(SHORT, LONG),
    ),
    "phimoe_plain": Model("phimoe", lambda: hf.PhimoeConfig(**SIZES, num_local_experts=6), PHI),
    "minicpm": Model("minicpm", lambda: hf.GraniteConfig(**SIZES, **SCALED), {"attention.scale": None}, in_turns=True),
    "minicpm_old": Model(
        "minicpm",
        lambda: hf.GraniteConfig(
            **{**SIZES, **SCALED, "residual_multiplier": 1.4 / math.sqrt(3), "logits_scaling": 64 / 256},
            rope_parameters=WHOLE,
        ),
        dict.fromkeys(
            [f"{part}_scale" for part in ("embedding", "residual", "logit")]
            + ["attention.scale", "rope.scaling.original_context_length"]
        ),
        in_turns=True,
        more=factors(SHORT, LONG),
    ),
    "minicpm3": Model("minicpm3", lambda: hf.MiniCPM3Config(**{**SIZES, **LATENT, "v_head_dim": 16}), LATENT_SAID),
    "minicpm3_long": Model(
        "minicpm3",
        lambda: hf.MiniCPM3Config(
            **{**SIZES, **LATENT, "v_head_dim": 16},
            rope_parameters=WHOLE | {"short_factor": SHORT[:5], "long_factor": LONG[:5]},
        ),
        LATENT_SAID | {"rope.scaling.original_context_length": None, "rope.scaling.type": "longrope"},
        more=factors(SHORT[:5], LONG[:5]),
    ),
}
