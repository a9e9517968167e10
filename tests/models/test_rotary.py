"""Frequencies of rotary embeddings, and factors of queries by temperature tuning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from detgen.models.rotary import Tuning, rotary_of

ROPE: dict[str, Any] = {"rope_theta": 5e5, "original_max_position_embeddings": 400}
FACTORS: list[float] = [1.1 + 0.013 * i for i in range(32)]


@pytest.mark.parametrize("tuning", [Tuning(32.0, 0.1, 0), Tuning(8192.0, 0.1, 1), Tuning(7.0, -0.3, 1)])
def test_each_factor_is_rounded_once(tuning: Tuning) -> None:
    every, by, offset = tuning
    exact = np.array([1 + by * math.log(1 + (p + offset) // every) for p in range(20_000)])
    assert (abs(tuning.factors(20_000) - exact) <= 2**-24 * abs(exact)).all()


def test_it_is_that_of_transformers() -> None:
    own = get_llama_4_attn_scale(torch.arange(300)[None], 0.1, 32).flatten()
    assert np.allclose(Tuning(32.0, 0.1, 0).factors(300), own.numpy(), rtol=1e-6)


@pytest.mark.parametrize("size", [18, 64])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 8.5, "truncate": False},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS},
    ],
    ids=lambda settings: settings["rope_type"],
)
def test_frequencies_are_rounded_where_transformers_rounds(settings: dict[str, Any], size: int) -> None:
    if "short_factor" in settings:
        settings = settings | dict.fromkeys(("short_factor", "long_factor"), FACTORS[: size // 2])
    module = LlamaRotaryEmbedding(LlamaConfig(head_dim=size, rope_parameters=ROPE | settings))
    found, own = rotary_of(module), module.inv_freq.numpy()
    assert found is not None
    assert np.allclose(found.frequencies, own, rtol=2**-23, atol=0)  # its powers may be off in the last place
    assert (found.frequencies == own).mean() > 0.9
