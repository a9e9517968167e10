"""What the benchmark's tests share: tiny models, rows, and an observer that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detgen.bench.interface import Job, ModelSource, Prompt
from detgen.bench.rows import Results, Row


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    """Random weights of the tiny configuration, on the CPU."""
    return ModelSource(
        target=None,
        draft=None,
        random_weights="tiny",
        device="cpu",
        dtype="float32",
        target_quant="none",
        draft_quant="none",
        threads=2,
        seed=0,
        positions=64,
        scratch=tmp_path,
    )


@pytest.fixture
def job() -> Job:
    """Five prompts of different lengths, two at a time."""
    prompts = tuple(Prompt(tuple(range(7 * i + 1, 7 * i + 5 + 2 * i)), 6 + i) for i in range(5))
    return Job(prompts, 2, (True,) * 5)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A measured row; what is given replaces what it has."""

    def make(label: str = "detgen none", **changes: Any) -> Row:
        values: dict[str, Any] = {
            "workload": "sample",
            "batch_size": 4,
            "peer": label.split()[0],
            "label": label,
            "precision": "float32",
            "synthetic": False,
            "fraction": 1.0,
            "requests": 4,
            "prompt_tokens": 40,
            "output_tokens": 100,
            "seconds": [1.0, 1.1, 0.9],
            "ttft": [(0.1, 0.2)] * 3,
            "tpot": [(0.01, 0.02)] * 3,
        }
        return Row(**(values | changes))

    return make


@pytest.fixture
def make_results() -> Callable[..., Results]:
    """Results of rows."""

    def make(*rows: Row) -> Results:
        environment = {
            "created": "2026-01-01T00:00:00+00:00",
            "detgen": "0.1.0",
            "device": "a processor",
            "threads": 2,
            "versions": {"torch": "2.13.0"},
            "models": {"target": "embedded:target", "dtype": "float32"},
        }
        roof = {"copy_bytes": 1e10, "product_operations": 1e11}
        return Results(
            environment, roof, {"sample": "the embedded prompts"}, list(rows), ["vllm skipped: not installed"]
        )

    return make


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[tuple[int, int, str, float | None]] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, done: int, total: int, what: str, seconds_left: float | None) -> None:
        self.steps.append((done, total, what, seconds_left))


@pytest.fixture
def told() -> Told:
    return Told()
