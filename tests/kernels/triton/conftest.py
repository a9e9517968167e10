"""Kernels run on the GPU, and where there is none in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(
    scope="session", params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
