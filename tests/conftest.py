"""What all tests share: no network, two threads, the embedded models, and no CUDA test without CUDA."""

from __future__ import annotations

import os

# Read by the libraries when they are first imported, hence set before anything else is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Any of these would colour the output that tests compare.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)

from pathlib import Path
from typing import NamedTuple

import pytest

import detgen


class DemoModels(NamedTuple):
    """Folders of the embedded models."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def demo_models() -> DemoModels:
    """The models that detgen ships and runs when no other is named."""
    folder = Path(detgen.__file__).parent / "demo_models"
    return DemoModels(folder / "target", folder / "draft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `cuda` where torch finds no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
