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


def written(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it writes to the process's own standard output and standard error."""
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as ended:
            cli.app(list(arguments), prog_name="detgen")
    return int(ended.value.code or 0), "".join(capfd.readouterr())


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
