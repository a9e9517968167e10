"""Command lines in the test's own process, with a run that does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import detgen.run
from detgen import cli
from detgen.engine.config import EngineConfig
from detgen.outputs import Totals
from detgen.params import SamplingParams
from detgen.run import RunConfig, RunSummary

SUMMARY = RunSummary(
    status="finished",
    output=Path("some-out"),
    written=Totals(prompts=3, samples=3),
    fresh=Totals(tokens=30),
    resumed=0,
    seconds=1.5,
    target_passes=10,
    peak_memory=2**20,
    sha256="f" * 64,
)

RunWith = Callable[..., tuple[Result, RunConfig]]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(cli.app, list(arguments), prog_name="detgen")


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> RunWith:
    """Invoke `detgen run` or `score` with a run that only keeps what it was given, and ends as `outcome` says."""

    def run_with(*arguments: str, outcome: RunSummary | BaseException = SUMMARY, command: str = "run") -> Any:
        seen: list[Any] = []

        def run(config: Any, observer: Any) -> RunSummary:
            seen.append(config)
            observer.message("a message")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(detgen.run, "run", run)
        monkeypatch.setattr(sys, "argv", ["detgen", command, *arguments])
        result = invoke(command, *arguments)
        return result, seen[0] if seen else RunConfig("", None, SamplingParams(), EngineConfig())

    return run_with
