"""Factors of queries by temperature tuning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from detgen.models.rotary import Tuning


@pytest.mark.parametrize("tuning", [Tuning(32.0, 0.1, 0), Tuning(8192.0, 0.1, 1), Tuning(7.0, -0.3, 1)])
def test_each_factor_is_rounded_once(tuning: Tuning) -> None:
    every, by, offset = tuning
    exact = np.array([1 + by * math.log(1 + (p + offset) // every) for p in range(20_000)])
    assert (abs(tuning.factors(20_000) - exact) <= 2**-24 * abs(exact)).all()


def test_it_is_that_of_transformers() -> None:
    own = get_llama_4_attn_scale(torch.arange(300)[None], 0.1, 32).flatten()
    assert np.allclose(Tuning(32.0, 0.1, 0).factors(300), own.numpy(), rtol=1e-6)
