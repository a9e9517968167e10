"""The measurement of the coordinator, with workers in the test's own process: it runs all, and looks at its memory."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from helpers.workers import LocalCluster

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import coordinator


def test_requests_and_bytes_a_second_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def local(config: Any, engine: Any, observer: Any, build: Any) -> LocalCluster:
        cluster = LocalCluster(config.number, lambda worker: build(engine))
        cluster.requests = [deque(maxlen=0) for _ in cluster.requests]  # kept, they would be what grows
        return cluster

    monkeypatch.setattr(coordinator, "RayCluster", local)
    monkeypatch.setattr("detgen.run.work._REPORT_SECONDS", 0.0)
    (tmp_path / "first").mkdir()
    coordinator.measure(400, 4, 2, 16, tmp_path / "first")  # what other tests left free is taken up by then
    capsys.readouterr()
    meter = coordinator.measure(8000, 4, 2, 16, tmp_path)
    printed = capsys.readouterr().out
    assert "a second" in printed
    assert "MiB at 8,000" in printed
    assert len(meter.memory) == coordinator._POINTS + 1
    (_, early), (_, late) = meter.memory[2], meter.memory[-1]
    assert late - early < 3, "it does not grow with the requests"
    assert (tmp_path / "out" / "outputs.jsonl").read_bytes().count(b"\n") == 8000


def test_a_run_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator.measure(200, 2, 0, 16, tmp_path)
    assert "at most" in capsys.readouterr().out
