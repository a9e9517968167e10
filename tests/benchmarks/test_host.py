"""The stand-in for a model of benchmarks/host.py fits the engine's loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import host


def test_rounds_are_measured(demo_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WARM", 1)
    monkeypatch.setattr(host, "ROUNDS", 4)
    found = host.measure(3, range(2, 4), AutoTokenizer.from_pretrained(demo_models.target))
    assert len(found) == 4
    assert all(r.engine > 0 and r.choosing > 0 for r in found)
