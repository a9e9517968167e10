"""Rows and results of a benchmark that never ran."""

from __future__ import annotations

from typing import Any

from detgen.bench.bench_results import Results, Row


def make_row(label: str = "detgen none", **changes: Any) -> Row:
    """A measured row; what is given replaces what it has."""
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


def make_results(*rows: Row) -> Results:
    """Results of rows."""
    environment = {
        "created": "2026-01-01T00:00:00+00:00",
        "detgen": "0.1.0",
        "device": "a processor",
        "threads": 2,
        "versions": {"torch": "2.13.0"},
        "models": {"target": "embedded:target", "dtype": "float32"},
    }
    roof = {"copy_bytes": 1e10, "product_operations": 1e11}
    return Results(environment, roof, {"sample": "the embedded prompts"}, list(rows), ["vllm skipped: not installed"])
