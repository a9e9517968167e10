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
    """Invoke `detgen run` with a run that does not run: it ends as `outcome` says and keeps what it was given."""

    def run_with(*arguments: str, outcome: RunSummary | BaseException = SUMMARY) -> tuple[Result, RunConfig]:
        seen: list[RunConfig] = []

        def run(config: RunConfig, observer: Any) -> RunSummary:
            seen.append(config)
            observer.message("a message")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(detgen.run, "run", run)
        monkeypatch.setattr(sys, "argv", ["detgen", "run", *arguments])
        result = invoke("run", *arguments)
        return result, seen[0] if seen else RunConfig("", None, SamplingParams(), EngineConfig())

    return run_with
